"""``fedweave check``: a page for people, JSON for programs, and an exit code for scripts."""

import json

import pytest

from fedweave.cli import main


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with two clients in my_clients/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDWEAVE_OVERRIDES", raising=False)
    (tmp_path / "my_clients").mkdir()
    for client in "ab":
        rows = [{"prompt": f"{client} {n}", "response": f"answer {n}"} for n in range(20)]
        (tmp_path / "my_clients" / f"{client}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path


def test_good_data_pass_and_the_run_is_named(place, capsys):
    assert main(["check", "my_clients"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("my_clients: 2 clients, 40 rows (train 32, validation 4, test 4)\n")
    for part in ("prompt characters", "Latin 100%", "  | [user] a 0", "scores: all by exact (short answers)"):
        assert part in page
    assert page.endswith("A run would take this data:\n  fedweave run own data.path=my_clients\n")


def test_bad_data_are_refused_with_every_kind_of_fault_once(place, capsys):
    with open(place / "my_clients" / "b.jsonl", "a") as out:
        out.write("{oops\n" + '{"prompt": "x"}\n' * 7)
    assert main(["check", "my_clients"]) == 1
    page = capsys.readouterr().out
    assert "  - b.jsonl:21: not valid JSON" in page
    assert "  - b.jsonl:22: no 'response'; a row needs" in page
    assert "6 more like it: b.jsonl:23, b.jsonl:24, b.jsonl:25, …" in page
    assert page.endswith("A run would refuse this data: 8 faults; --json lists them all.\n")


def test_json_holds_everything(place, capsys):
    (place / "my_clients" / "c.jsonl").write_text("oops\n" * 50)
    assert main(["check", "my_clients", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passes"] is False and len(found["faults"]) == 50
    assert found["faults"][0]["where"] == "c.jsonl:1" and set(found["clients"]) == {"a", "b"}


def test_a_table_with_columns_of_its_own(place, capsys):
    lines = ["frage,antwort,haus", *(f"was ist {n}?,das,{'nord' if n % 2 else 'süd'}" for n in range(60))]
    (place / "fälle.csv").write_text("\n".join(lines), encoding="utf-8")
    columns = "data.fields=prompt=frage,response=antwort,client=haus"
    assert main(["check", "fälle.csv"]) == 1
    assert "59 more like it" in capsys.readouterr().out
    assert main(["check", "fälle.csv", columns]) == 0
    page = capsys.readouterr().out
    assert "2 clients, 60 rows" in page and "nord" in page and "süd" in page
    assert f"fedweave run own 'data.path=fälle.csv' {columns}" in page


def test_a_recipe_brings_its_model(place, capsys, model_folder):
    model = f"backbone.model={model_folder('llama')}"
    assert main(["check", "my_clients", "quickstart", model]) == 0
    page = capsys.readouterr().out
    assert "prompt tokens" in page and "  | Response: answer 0" in page
    assert f"fedweave run quickstart data.source=jsonl data.path=my_clients {model}" in page
    assert main(["check", "my_clients", model, "backbone.max_length=16", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["unit"] == "tokens"


def test_a_model_that_is_not_here_is_no_fault_of_the_data(place, capsys):
    assert main(["check", "my_clients", "own", "backbone.model=./nowhere"]) == 0
    assert "lengths are in characters, since there is no model: backbone.model=./nowhere" in capsys.readouterr().out


def test_rows_of_no_client_are_counted_before_they_are_dealt_out(place, capsys):
    assert main(["check", "my_clients/a.jsonl", "data.clients=3"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("my_clients/a.jsonl: 3 clients, 20 rows") and "rows to deal out" in page
    assert "dealt out to data.clients=3 simulated clients" in page


def test_many_clients_are_summed_up(place, capsys):
    for n in range(40):
        (place / "my_clients" / f"c{n:02}.jsonl").write_text((place / "my_clients" / "a.jsonl").read_text())
    assert main(["check", "my_clients"]) == 0
    assert "… 22 more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonsense"], "there is no recipe 'nonsense'"),
        (["own", "quickstart"], "one recipe at a time"),
        (["training.round=3"], "did you mean 'training.rounds'"),
        (["data.holdout=3"], "data.holdout must be between"),
    ],
)
def test_a_wrong_command_is_not_the_datas_fault(place, capsys, arguments, complaint):
    assert main(["check", "my_clients", *arguments]) == 2
    assert complaint in capsys.readouterr().err
