"""Was it worth it: the verdict says what the clients say, and no more."""

import json

import pytest

from fedweave.analysis.worth import paired, read_worth, verdict, worth, worth_text
from tests.helpers import read_json


def outcome(**clients):
    """A test with (score, loss) of every client."""
    return {"clients": {name: {"score": score, "loss": loss} for name, (score, loss) in clients.items()}}


def test_gains_are_paired_and_their_sign_means_better():
    ours, theirs = ({c: {"loss": x, "score": 1 - x} for c, x in zip("abc", xs, strict=True)} for xs in
                    ((0.1, 0.2, 0.3), (0.2, 0.3, 0.4)))  # fmt: skip
    for figure in ("loss", "score"):
        found = paired(figure, ours, theirs, list("abc"))
        assert found["gain"] == pytest.approx(0.1) and found["low"] == pytest.approx(0.1), "all gain the same"
        assert (found["better"], found["worse"]) == (3, 0) and verdict(found) == "better"
        assert verdict(paired(figure, theirs, ours, list("abc"))) == "worse"


def test_a_mean_above_zero_is_no_proof():
    ours = {"a": {"loss": 0.1}, "b": {"loss": 0.5}, "c": {"loss": 0.3}}
    theirs = {"a": {"loss": 0.4}, "b": {"loss": 0.4}, "c": {"loss": 0.35}}
    found = paired("loss", ours, theirs, list("abc"))
    assert found["gain"] > 0 > found["low"] and found["worse"] == 1 and verdict(found) == "unclear"
    assert found["low"] == pytest.approx(0.0833 - 4.3027 * 0.20207 / 3**0.5, abs=1e-3), "Student's t, two degrees"


def test_the_answer_is_a_sentence_for_each_reference():
    ours = outcome(a=(0.8, 0.2), b=(0.9, 0.3), c=(0.7, 0.1))
    alone = outcome(a=(0.5, 0.9), b=(0.61, 0.8), c=(0.4, 0.9))
    one = outcome(a=(0.9, 0.2), b=(0.8, 0.31), c=(0.7, 0.1))
    found = worth("fedweave", 3, ours, {"local-only": alone, "fedit": one})
    first, second = found["answer"].split(". 3 experts")
    assert first.startswith(
        "Federating was worth it: mean score 0.800 against 0.503 when every client trains alone"
    )
    assert "better for 3 and worse for 0 of 3 clients" in first
    assert second.startswith(" and one shared adapter differ by nothing clear: mean score 0.800 against 0.800")
    text = worth_text(found)
    assert "mean of clients" in text and "One seed" in text


def test_losses_speak_where_scores_do_not():
    ours, alone = outcome(a=(0.5, 0.2), b=(0.6, 0.3)), outcome(a=(0.5, 0.9), b=(0.6, 1.0))
    assert "worth it: mean loss" in worth("fedweave", 2, ours, {"local-only": alone})["answer"]


def test_one_client_proves_nothing():
    found = worth("fedweave", 2, outcome(a=(0.9, 0.1)), {"local-only": outcome(a=(0.1, 0.9))})
    assert "no clear difference" in found["answer"] and "proves nothing" in found["answer"]


def test_a_run_is_weighed_once_and_its_page_says_so(tiny_copy, says, complains):
    run = tiny_copy()
    text = says("worth", run, "--quiet")
    found = read_worth(run)
    assert found["answer"] in " ".join(text.split()) and set(found["against"]) == {"alone", "one adapter"}
    clients = read_json(run / "summary.json")["test"]["best"]["clients"]
    assert {name: each["ours"] for name, each in found["clients"].items()} == clients
    for method, name in (("local-only", "alone"), ("fedit", "one adapter")):
        summary = read_json(run / "worth" / method / "summary.json")
        assert summary["test"]["best"]["clients"] == {c: each[name] for c, each in found["clients"].items()}
    before = (run / "worth" / "fedit" / "summary.json").read_bytes()
    assert says("worth", run, "--quiet") == text
    assert (run / "worth" / "fedit" / "summary.json").read_bytes() == before, "nothing is trained twice"
    says("report", run)
    page = (run / "report.html").read_text()
    assert 'id="figure-worth-loss"' in page and "Against every client alone" in page
    odd = {"clients": {}}, {"against": {"alone": []}}, {"clients": {"a": {}}}, {"against": {"x": []}}
    for parts in odd:
        (run / "worth.json").write_text(json.dumps({**found, **parts}))
        assert "worth.json is damaged" in complains("report", run)
    (run / "worth.json").write_text("{}")
    assert "worth.json is damaged" in complains("report", run)


def test_each_client_alone_is_measured_with_its_own_model(tiny_run):
    """The clients' figures of local-only are not those of one model."""
    run = tiny_run("method=local-only", "training.lr=1e-2")
    best = read_json(run / "summary.json")["test"]["best"]
    assert len(best["clients"]) == 3
    assert best["clients"]["client_0"]["loss"] != pytest.approx(best["loss"]["sparse"]["macro"])


@pytest.mark.parametrize(
    ("overrides", "word"),
    [(["method=local-only", "training.lr=1e-2"], "is itself what others are held against")],
)
def test_what_cannot_be_weighed(tiny_run, complains, overrides, word):
    assert word in complains("worth", tiny_run(*overrides))


@pytest.mark.parametrize("own", ["living.notice=open", "federation.secure_aggregation=true"])
def test_what_references_cannot_do_is_left_out_of_theirs(tiny_copy, says, own):
    assert "alone" in says("worth", tiny_copy(own), "--quiet")


def test_a_run_that_has_not_ended_cannot_be_weighed(tiny_copy, complains):
    run = tiny_copy()
    (run / "summary.json").unlink()
    assert "has not been tested yet" in complains("worth", run)
