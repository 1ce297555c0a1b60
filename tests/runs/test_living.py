"""Data that change while a run goes on: rows come and go, and resuming finds them as they were."""

import pytest

import fedweave
from fedweave.analysis.subject import open_subject
from fedweave.cli import main
from fedweave.config import load_config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.report.timeline import happened, lives
from fedweave.runs.folder import RunFolder
from fedweave.runs.reading import read_run
from fedweave.runs.workspace import prepare
from tests.helpers import events, read_json
from tests.runs.test_faults import state_of

OPENING = [
    "living.notice=open", "living.least=8", "data.train=40", "data.clients=4", "discovery.warmup_steps=6",
    "discovery.warmup_lr=1e-2", "training.rounds=4", "living.lessons=1",
    "data.changes=['2: client_0, client_1 gain sum', '3: all lose mood', '4: client_2 gains 50% of choice']",
]  # fmt: skip
CHANGES = "data.changes=['2: client_0, client_1 gain sum', '3: all lose mood']"
METHODS = ["fedit", "fedlease", "ifca", "fedrouter", "local-only", "centralised", "oracle", "fedweave"]


@pytest.mark.parametrize("method", METHODS)
def test_rows_come_and_go_under_every_method(tmp_path, small, method):
    run = tmp_path / "run"
    assert main(["run", "quickstart", *small, CHANGES, f"method={method}", f"output={run}", "--quiet"]) == 0
    first, second = events(run, "change")
    assert (first["round"], second["round"]) == (2, 3)
    assert sum(first["came"].values()) == 12 and not first["went"]
    assert not second["came"] and sum(second["went"].values()) == 12
    assert sum(second["fed"]) == 36, "sums, edits and choices are trained on"
    assert first["bytes_up"] and read_json(run / "summary.json")["communication"]["changes_up"] >= 0


def test_a_run_resumed_after_every_round_finds_the_rows_of_that_round(tmp_path, small):
    """Also the best round, which is chosen anew where the data have changed."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    begin = ["run", "quickstart", *small, CHANGES, "training.rounds=4", "method=fedit", "--quiet"]
    assert main([*begin, f"output={whole}"]) == 0
    assert main([*begin, f"output={broken}", "training.rounds=1"]) == 0
    for rounds in (2, 3, 4):
        assert main(["resume", str(broken), f"training.rounds={rounds}", "--quiet"]) == 0
    assert state_of(whole) == state_of(broken)
    assert read_json(whole / "summary.json")["validation"]["best_round"] >= 3


# -------------------------------------------------------------------------------------- experts that open


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_kill_and_resume_around_an_opening_is_bit_identical(tmp_path, small, tiny_run, precision):
    """A run that ends and goes on before and after every change is the run that never stopped. What rounding took
    from a router with fewer outputs is nothing to a wider one."""
    rounding = [f"federation.update_dtype={precision}"] if precision != "float32" else []
    whole, broken = tiny_run(*OPENING, *rounding), tmp_path / "broken"
    first = events(whole, "change")[0]
    assert first["round"] == 2 and first["opened"], "an expert has opened"
    begin = ["run", "quickstart", *small, *OPENING, *rounding, "training.rounds=1", f"output={broken}", "--quiet"]
    assert main(begin) == 0
    for rounds in (2, 3, 4):
        assert main(["resume", str(broken), f"training.rounds={rounds}", "--quiet"]) == 0
    assert state_of(whole) == state_of(broken)


@pytest.mark.parametrize("moment", ["sign", "grow", "lesson"])
def test_a_run_killed_while_an_expert_opens_opens_it_again(tmp_path, small, tiny_run, moment, monkeypatch):
    from fedweave.methods.growing import GrowRouter
    from fedweave.methods.lessons import Lesson
    from fedweave.methods.newcomers import Sign

    step = {"sign": Sign, "grow": GrowRouter, "lesson": Lesson}[moment]
    broken = tmp_path / "broken"
    with monkeypatch.context() as patched:
        patched.setattr(step, "read", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["run", "quickstart", *small, *OPENING, f"output={broken}", "--quiet"]) == 130
    assert RunFolder(broken).newest().meta["completed"] == 1
    assert main(["resume", str(broken), "--quiet"]) == 0
    assert state_of(tiny_run(*OPENING)) == state_of(broken)


def test_everything_copes_with_experts_that_opened(tiny_run, tmp_path, says):
    """The best round, the bundle, the report, the budget and the live view."""
    run, bundle = tiny_run(*OPENING), tmp_path / "bundle"
    summary, changes = read_json(run / "summary.json"), events(run, "change")
    experts = changes[-1]["experts"]
    assert summary["experts"] == experts > read_json(run / "discovery.json")["experts"]
    assert summary["validation"]["best_round"] >= changes[-1]["round"], "the best is chosen anew after a change"
    says("export", run, bundle)
    model = fedweave.load(bundle)
    assert model.experts.layout.experts == experts
    assert model.generate(["Ada has 3 pens and finds 4 more. How many pens in all?"])
    page = tmp_path / "report.html"
    says("report", run, "--output", page)
    opened = f"expert {changes[0]['opened'][0]} opened for"
    assert "The life of the experts" in page.read_text() and opened in page.read_text()
    new = changes[0]["opened"][0]
    assert set(changes[0]["feeders"][new]) == {p["client"] for p in changes[0]["placed"] if p["expert"] == new}
    assert "fed by, at last" in page.read_text()
    assert "between rounds" in says("budget", run)
    assert opened in says("watch", run, "--once")


def test_a_run_that_ends_with_fewer_experts_than_it_began_with_has_a_report_and_goes_on(tiny_copy, tmp_path, says):
    """Nobody feeds the expert for moods any more; sums wait for the operator."""
    asking = [item for item in OPENING if not item.startswith("living.notice")]
    run, page = tiny_copy(*asking, "living.notice=ask", "living.retire=1"), tmp_path / "report.html"
    last = events(run, "change")[-1]
    assert last["retired"] and last["experts"] < read_json(run / "discovery.json")["experts"]
    says("report", run, "--output", page)
    for told in ("was retired: nobody fed it", "Rows wait for your word", "living.notice=open training.rounds=6"):
        assert told in page.read_text()
    assert main(["resume", str(run), "living.notice=open", "training.rounds=6", "--quiet"]) == 0
    assert events(run, "change")[-1]["opened"]


def test_the_timeline_knows_every_expert_whatever_its_number(tiny_run):
    """Numbers move up when experts close; a life keeps the one that it opened with."""
    run = read_run(tiny_run(*OPENING))
    first = run.changes[0]
    m, fed = first["experts"], first["fed"]
    later = {**first, "came": {}, "opened": [], "placed": [], "round": 4, "experts": m - 1, "feeders": []}
    closing = {**later, "retired": [0], "fed": fed[1:]}
    joining = {**later, "merged": [0, m - 2], "retired": [], "experts": m - 2, "fed": [*fed[2:-1], 7], "round": 5}
    run.changes = [first, closing, joining]
    found = {life.name: life for life in lives(run)}
    assert found["expert 0"].end == "retired" and found["expert 0"].closed == 4
    assert {found["expert 1"].end, found[f"expert {m - 1}, round 2"].end} == {"merged"}
    assert len(found) == m + 1 and found[f"expert {m - 3}, round 5"].closed is None
    assert [life.stretches[-1] for life in lives(run) if life.closed is None][-1] == (5, 7)


def test_an_expert_that_nobody_feeds_is_told_and_no_reason_to_choose_the_best_anew(tiny_run):
    run = read_run(tiny_run(*OPENING))
    last, before = run.changes[-1], run.best_validation
    quiet = {"came": {}, "went": {}, "placed": [], "opened": [], "merged": [], "retired": [], "round": 9}
    run.changes = [*run.changes, {**last, **quiet, "unfed": [1], "fed_again": [0]}]
    assert happened(run.changes[-1]) == [
        "nobody who is here feeds expert 1 any more; it stays as it is", "expert 0 is fed again"
    ]  # fmt: skip
    run.summary = None
    assert run.best_validation["round"] >= last["round"] and before is not None


def test_the_operator_is_asked_and_answers_by_resuming(tmp_path, small, capsys):
    run = tmp_path / "run"
    asking = [item for item in OPENING if not item.startswith("living.notice")]
    assert (
        main(["run", "quickstart", *small, *asking, "living.notice=ask", "training.rounds=2", f"output={run}"]) == 0
    )
    assert "kept apart; resume with living.notice=open" in capsys.readouterr().err
    before = events(run, "change")[-1]
    assert not before["opened"] and any(bucket["expert"] < 0 for bucket in before["placed"])
    assert main(["resume", str(run), "living.notice=open", "training.rounds=4", "--quiet"]) == 0
    assert events(run, "change")[1]["opened"]


def test_a_run_that_began_without_noticing_says_so_before_anything_and_goes_on_as_it_was(tmp_path, small, capsys):
    run = tmp_path / "run"
    quiet = [item for item in OPENING if not item.startswith("living.notice")]
    assert main(["run", "quickstart", *small, *quiet, "training.rounds=1", f"output={run}", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["resume", str(run), "living.notice=open", "training.rounds=2"]) != 0
    said = capsys.readouterr().err
    assert "kept no signatures" in said and "resuming" not in said and "features" not in said
    assert load_config(run / "config.yaml").living.notice == "off", "and is not spoilt by having been asked"
    assert main(["resume", str(run), "training.rounds=2", "--quiet"]) == 0


def test_what_one_client_alone_brings_waits_also_in_a_run_that_is_resumed(tmp_path, small, says):
    """Its first kind opens an expert; the second one is looked at once, and opens when the operator says so."""
    whole, broken, rounds = tmp_path / "whole", tmp_path / "broken", (1, 2, 3, 4)
    alone = [item for item in OPENING if not item.startswith("data.changes")]
    changes = "data.changes=['2: client_0 gains sum', '3: client_0 gains choice']"
    begin = ["run", "quickstart", *small, *alone, changes, "alignment.max_experts=12", "--quiet"]
    assert main([*begin, f"output={whole}"]) == 0
    assert main([*begin, f"output={broken}", "training.rounds=1"]) == 0
    for last in rounds[1:]:
        assert main(["resume", str(broken), f"training.rounds={last}", "--quiet"]) == 0
    assert state_of(whole) == state_of(broken)
    first, second = events(whole, "change")
    waits = {bucket["waits"] for bucket in second["placed"] if bucket["expert"] < 0}
    assert first["opened"] and not second["opened"] and "living.alone=2" in waits
    told = "of client_0 fit no expert and are kept apart; resume with living.alone=2 to open one"
    assert told in says("watch", whole, "--once")
    assert main(["resume", str(whole), "living.alone=2", "training.rounds=5", "--quiet"]) == 0
    assert events(whole, "change")[2]["opened"]


def test_a_run_that_kept_no_signatures_says_so(tiny_copy, complains):
    run = tiny_copy()
    assert "it began with living.notice=off" in complains(
        "resume", run, "living.notice=open", "training.rounds=4", "--quiet"
    )


def test_several_processes_say_that_they_cannot_share_clients_whose_data_change(monkeypatch, small):
    """Before anything is loaded: there is no such model."""
    monkeypatch.setattr("fedweave.runs.workspace.world", lambda: object())
    config = load_config("quickstart", [*small, CHANGES, "backbone.model=nowhere"])
    with pytest.raises(UserError, match=r"data\.changes needs one process; start the run without torchrun"):
        prepare(config, Console(quiet=True))


@pytest.mark.parametrize("other", ["privacy.level=example", "federation.secure_aggregation=true"])
@pytest.mark.parametrize("asked", ["living.notice=open", CHANGES])
def test_privacy_and_masked_sums_say_that_data_must_stay(other, asked):
    private = ["discovery.max_buckets=1", "discovery.sketch=4"]
    with pytest.raises(UserError, match=r"leave data\.changes empty and living\.notice=off"):
        load_config("quickstart", [*private, other, asked])


def test_off_is_a_word():
    assert load_config("quickstart", ["living.notice=off"]).living.notice == "off"
    assert load_config("quickstart", ["living.notice=open"]).living.notice == "open"


def test_another_method_says_that_it_cannot(small, complains, tmp_path):
    said = complains(
        "run", "quickstart", *small, "method=fedit", "living.notice=open", f"output={tmp_path / 'run'}"
    )
    assert "method=fedit cannot open experts in mid-run; set living.notice=off" in said


def test_clients_are_tested_on_what_they_have_in_the_end(tiny_run):
    folder = tiny_run("data.train=40", "data.changes=['2: all gain sum']", "living.notice=open", "living.least=2",
                      "living.alarms=0.5")  # fmt: skip
    test = open_subject(folder, "last", Console(quiet=True)).workspace.test
    sums = [label == "sum" for label in test.labels]
    assert all(test.clients.of(name)[sums].sum() > 0 for name in test.clients.names)
