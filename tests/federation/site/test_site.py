"""`fedweave site`: a site's file, its check, and one sentence for whatever is wrong with it."""

import json

import pytest
import yaml

from fedweave.cli import main
from fedweave.data.own import read_examples
from fedweave.errors import UserError
from fedweave.federation.site.settings import SiteConfig
from fedweave.federation.site.source import OwnFiles

SMALL = ["experts.rank=4", "discovery.max_buckets=3", "discovery.restarts=2", "router.hidden=8",
         "backbone.max_length=128"]  # fmt: skip


@pytest.fixture
def site(tmp_path, model_folder):
    """Call with changes to get a site file; the site has 40 rows of two patterns."""
    rows = [{"prompt": f"Add {i} and {i}.", "response": str(2 * i)} for i in range(20)]
    rows += [{"prompt": f"Which letter is number {i} of the list?", "response": "abc"[i % 3]} for i in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**changes):
        tree = {
            "name": "north", "data": "data.jsonl", "superlink": {"insecure": True},
            "backbone": {"model": str(model_folder("llama")), "device": "cpu"}, **changes,
        }  # fmt: skip
        path = tmp_path / "site.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return make


def test_a_file_that_is_written_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """Else a file that is replaced row by row would lose its last rows for a round, and get them back as news."""
    file = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": f"Say {n}.", "response": str(n)}) for n in range(4)]
    file.write_text("\n".join(rows[:1]))
    source = OwnFiles(SiteConfig("clinic", str(file)))

    def slowly(path, fields):
        found = read_examples(path, fields)
        file.write_text("\n".join(rows))
        return found

    monkeypatch.setattr("fedweave.federation.site.source.read_examples", slowly)
    with pytest.raises(UserError, match="was written while it was read"):
        source.look(0, 1)
    monkeypatch.setattr("fedweave.federation.site.source.read_examples", read_examples)
    assert len(source.look(0, 2)) == 4 and source.look(0, 3) is None


@pytest.mark.parametrize("method", ["fedweave", "fedlease", "fedsa-lora"])
def test_check_shows_what_would_leave_and_leaves_nothing_behind(site, tmp_path, capsys, method):
    path = site()
    assert main(["site", "check", str(path), "quickstart", *SMALL, f"method={method}", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "site north: ready" in shown and "36 rows to train on, 4 to validate on" in shown
    steps = {line.split()[0] for line in shown.splitlines()[8:] if line.strip()}
    assert {"hello", "discover", "train", "evaluate"} <= steps
    assert ("warm" in steps) == (method == "fedweave") and ("start" in steps) == (method != "fedsa-lora")
    assert "Add 3" not in shown and sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "site.yaml"]


def test_check_keeps_to_the_sites_own_floors(site, capsys):
    """A rehearsal is short, but not shorter than the site allows."""
    path = site(floors={"steps": 4, "bucket": 5})
    assert main(["site", "check", str(path), "quickstart", *SMALL, "training.local_steps=9", "--quiet"]) == 0
    assert "steps 4" in capsys.readouterr().out
    assert main(["site", "check", str(path), "quickstart", *SMALL, "training.local_steps=3", "--quiet"]) == 2
    assert "asks for 3, where this site's floors.steps is 4" in capsys.readouterr().err


def test_check_rehearses_what_only_hostile_sites_lead_to(site, capsys):
    chosen = [*SMALL, "federation.contested=vote"]
    assert main(["site", "check", str(site()), "quickstart", *chosen, "--quiet"]) == 0
    sent = {tuple(line.split()[:2]) for line in capsys.readouterr().out.splitlines()[8:]}
    assert {("relabel", "experts"), ("rewarm", "router"), ("compare", "losses")} <= sent


@pytest.mark.parametrize("notice", ["open", "ask"])
@pytest.mark.parametrize("buckets", [1, 3])
def test_check_rehearses_a_kind_that_nobody_knows(site, capsys, notice, buckets):
    chosen = [
        *SMALL,
        f"living.notice={notice}",
        "living.lessons=1",
        f"discovery.max_buckets={buckets}",
        "alignment.max_experts=2",
    ]
    assert main(["site", "check", str(site()), "quickstart", *chosen, "--quiet"]) == 0
    shown = capsys.readouterr().out
    sent = {tuple(line.split()[:2]) for line in shown.splitlines()[8:]}
    assert {("news", "came"), ("sign", "signatures"), ("grow", "router"), ("lesson", "counts")} <= sent
    assert ("train", "router") not in sent, "a router that may grow rests in the rounds"
    assert "Add 3" not in shown


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": ""}, "name must be letters, digits"),
        ({"data": "nothing.jsonl"}, "there is no file"),
        ({"dta": "x"}, "unknown key of a site's file 'dta': did you mean 'data'?"),
        ({"fields": {"prompt": "question"}}, "no 'question', which `fields` in the site's file names for prompt"),
        ({"data": "other.jsonl"}, "or `fields` in the site's file names its columns"),
        ({"fields": {"ask": "question"}}, "`fields` in the site's file: 'ask' is nothing that a row has"),
        ({"superlink": {"root_certificates": "ca.crt", "private_key": "site.key"}}, "root_certificates="),
        ({"superlink": {"root_certificates": "data.jsonl", "private_key": "data.jsonl"}}, "holds no certificate"),
        ({"superlink": {"insecure": True, "address": "server.example.org"}}, "must be a host and a port"),
        ({"superlink": {}}, "needs root_certificates and private_key"),
        ({"backbone": {"model": "nowhere/nothing", "device": "cpu"}}, "nowhere/nothing"),
        ({"backbone": {"device": "cuda:77"}}, "backbone.device"),
    ],
)
def test_a_broken_site_is_one_sentence(site, tmp_path, capsys, changes, sentence):
    (tmp_path / "other.jsonl").write_text('{"question": "Why?"}\n')
    assert main(["site", "check", str(site(**changes)), "quickstart", *SMALL, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.strip().splitlines()) == 1


def test_a_site_names_its_own_columns(site, tmp_path, capsys):
    """Sites of one federation have tables of different shapes."""
    rows = [f"Add {i} and {i}.,{2 * i},ward {i % 3}" for i in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["question,answer,ward", *rows]))
    path = site(data="rows.csv", fields={"prompt": "question", "response": "answer"})
    assert main(["site", "check", str(path), "quickstart", *SMALL, "--quiet"]) == 0
    assert "18 rows to train on, 2 to validate on" in capsys.readouterr().out


def test_a_site_that_cannot_read_its_rows_joins_nobody(site, monkeypatch, capsys):
    pytest.importorskip("flwr")
    from fedweave.federation.engines.flower.launch import SuperNode

    monkeypatch.setattr(SuperNode, "start", lambda node: pytest.fail("it has joined"))
    assert main(["site", "start", str(site(data="nothing.jsonl"))]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_a_malformed_row_is_named(site, tmp_path, capsys):
    path = site()
    with open(tmp_path / "data.jsonl", "a") as out:
        out.write('{"prompt": "x"}\n')
    assert main(["site", "check", str(path), "quickstart", *SMALL, "--quiet"]) == 2
    assert "data.jsonl:41: no 'response'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["quickstart"], "--root-certificates is missing"),
        (["quickstart", "--insecure"], "federation.sites=3"),
        (["quickstart", "federation.sites=2", "method=oracle", "--insecure"], "simulations only"),
        (["quickstart", "federation.sites=2", "--root-certificates", "none.crt"], "there is no file none.crt"),
        (["--insecure"], "name a recipe"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["federate", *arguments]) == 2
    assert sentence in capsys.readouterr().err and not list(tmp_path.iterdir())
