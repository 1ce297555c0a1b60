"""Every finding fires when it should and keeps quiet when it should not."""

import pytest

from fedweave.report.findings import FINDINGS, findings


def clients(*rows):
    """(bucket sizes, experts) per client."""
    return {f"c{i}": {"buckets": sizes, "experts": experts} for i, (sizes, experts) in enumerate(rows)}


def validations(*losses, **more):
    return [
        {"event": "validation", "round": t, "loss": loss, "tasks": {"a": loss}, "router_entropy": 0.0, **more}
        for t, loss in enumerate(losses)
    ]


def outcome(sparse=1.0, soft=1.0, bare=5.0, routing=None, **more):
    return {
        "tasks": {"a": "A", "b": "B"},
        "test": {
            "best": {
                "used": "sparse",
                "round": 1,
                "loss": {"sparse": {"a": sparse, "macro": sparse}, "soft": {"a": soft, "macro": soft}},
                "routing": routing or {},
                **more,
            },
            "untouched": {"loss": {"a": bare, "macro": bare}},
        },
    }


def discovery(experts=2, **parts):
    return {"experts": experts, "clients": {}, **parts}


def audit(local, whole):
    return {"local": {"purity": local}, "global": {"purity": whole}}


def pulling(*cosines):
    return [rounded(t, agreement={"odd": c, "plain": 0.4}) for t, c in enumerate(cosines)]


def rounded(t, **figures):
    return {"event": "round", "round": t, "refused": [], "agreement": {}, **figures}


def bucket(expert, waits=""):
    return {"client": "c0", "rows": 9, "expert": expert, "nearest": 0, "distance": 0.9, "waits": waits}


def changed(t, placed=(), fed=(5, 5), **figures):
    parts = {name: [] for name in ("opened", "merged", "retired")} | {"came": {"c0": 9}, "went": {}}
    return {"event": "change", "round": t, "placed": list(placed), "fed": list(fed), "experts": len(fed)} | (
        parts | figures
    )


CASES = {  # finding -> (fires, keeps quiet)
    "rows_apart": (
        {"events": [changed(2, [bucket(-1, "living.notice=open")])]},
        {"events": [changed(2, [bucket(-1, "living.notice=open")]), changed(4, [bucket(1)])]},
    ),
    "unfed_expert": ({"events": [changed(2, fed=(5, 0))]}, {"events": [changed(2)]}),
    "opened_experts": (
        {"events": [changed(2, [bucket(1)], opened=[1])]},
        {"events": [changed(2, [bucket(0)])]},
    ),
    "starving_expert": (
        {"discovery": discovery(2, clients=clients(([90, 5], [0, 1])))},
        {"discovery": discovery(2, clients=clients(([60, 40], [0, 1])))},
    ),
    "unused_expert": (
        {"events": validations(1.0, expert_load=[0.99, 0.01])},
        {"events": validations(1.0, expert_load=[0.9, 0.1])},
    ),
    "low_purity": (
        {"discovery": discovery(2, audit=audit(0.95, 0.6))},
        {"discovery": discovery(2, audit=audit(0.95, 0.9))},
    ),
    "client_that_hurts": ({"events": pulling(-0.3, -0.2, 0.1)}, {"events": pulling(-0.3, 0.4, 0.3)}),
    "in_quarantine": (
        {"events": [rounded(3, quarantined=["site-q", "site-r's buckets of expert 2"])]},
        {"events": [rounded(3)]},
    ),
    "left_out": ({"events": [rounded(3, left_out=["site-q"])]}, {"events": [rounded(3)]}),
    "refused_answers": (
        {"events": [rounded(1, refused=[{"client": "odd", "reason": "it holds NaN"}])]},
        {"events": [rounded(1)]},
    ),
    "experts_at_the_edge": (
        {"discovery": discovery(4, alignment_silhouettes={"2": 0.1, "3": 0.2, "4": 0.3})},
        {"discovery": discovery(3, alignment_silhouettes={"2": 0.1, "3": 0.4, "4": 0.3})},
    ),
    "buckets_at_the_edge": (
        {"config": {"discovery": {"max_buckets": 2}}, "discovery": discovery(clients=clients(([5, 5], [0, 1])))},
        {"config": {"discovery": {"max_buckets": 3}}, "discovery": discovery(clients=clients(([5, 5], [0, 1])))},
    ),
    "faint_alignment": (
        {"discovery": discovery(alignment_silhouettes={"2": 0.05, "3": 0.02})},
        {"discovery": discovery(alignment_silhouettes={"2": 0.35, "3": 0.02})},
    ),
    "one_expert": ({"discovery": discovery(1)}, {"discovery": discovery(2)}),
    "undecided_router": (
        {"discovery": discovery(2), "events": validations(1.0, router_entropy=0.65)},
        {"discovery": discovery(2), "events": validations(1.0, router_entropy=0.1)},
    ),
    "worse_than_untouched": ({"summary": outcome(bare=0.5)}, {"summary": outcome(bare=5.0)}),
    "overfitting": ({"events": validations(3.0, 1.0, 1.5)}, {"events": validations(3.0, 1.0, 1.01)}),
    "still_improving": (
        {"events": validations(3.0, 2.0, 1.5), "live": {"state": "finished"}},
        {"events": validations(3.0, 1.5, 1.499), "live": {"state": "finished"}},
    ),
    "small_test": ({"manifest": {"test": ["x"] * 24}}, {"manifest": {"test": ["x"] * 400}}),
    "sparse_costs": (
        {"summary": outcome(sparse=1.3), "discovery": discovery(2)},
        {"summary": outcome(), "discovery": discovery(1)},
    ),
    "experts_per_task": (
        {"summary": outcome(routing={"a": [0.9, 0.1], "b": [0.8, 0.2]}), "discovery": discovery(2)},
        {"summary": outcome(routing={"a": [1.0], "b": [1.0]}), "discovery": discovery(1)},
    ),
    "without_expert": (
        {"summary": outcome(routing={"a": [0.9, 0.1], "b": [0.2, 0.1]})},
        {"summary": outcome(routing={"a": [0.9, 0.1], "b": [0.3, 0.6]})},
    ),
    "went_back": (
        {"events": [{"event": "setback", "round": 5, "best_round": 3, "pace": 0.5, "ended": False}]},
        {"events": validations(1.0)},
    ),
    "scattered_kinds": (
        {"summary": outcome(decided={"sums": 0.97, "copies": 0.6})},
        {"summary": outcome(decided={"sums": 0.97, "copies": 0.95})},
    ),
}


def test_every_finding_has_its_cases():
    assert set(CASES) == {check.__name__ for check in FINDINGS}


@pytest.mark.parametrize("check", FINDINGS, ids=lambda check: check.__name__)
def test_a_finding_fires_and_keeps_quiet(check, record):
    fires, quiet = CASES[check.__name__]
    found = check(record(**fires))
    assert found is not None and found.level in ("warning", "note", "good") and found.text.endswith(".")
    assert check(record(**quiet)) is None


def test_nothing_is_known_of_an_empty_run(record):
    assert findings(record()) == []


def test_losses_of_other_data_are_not_compared(record):
    """Data changed before round 2: what was lower before that is no better."""
    events = [*validations(0.5, 0.4, 1.5, 1.2, 1.0), changed(2)]
    titles = {f.title for f in findings(record(events=events, live={"state": "finished"}))}
    assert "It was still getting better" in titles and "Later rounds did harm" not in titles
    few = record(events=[*validations(0.5, 0.4, 0.3), changed(2)], live={"state": "finished"})
    assert "It was still getting better" not in {f.title for f in findings(few)}, "one validation is no course"


def test_who_feeds_an_expert_is_looked_up_where_data_changed(record):
    """An expert that opened is fed, and one that lost its last rows is not starving but left."""
    run = record(discovery=discovery(2, clients=clients(([90, 5], [0, 1]))), events=[changed(2, fed=(50, 40, 0))])
    titles = [f.title for f in findings(run)]
    assert "A starving expert" not in titles and "An expert that nobody feeds" in titles


def test_what_waits_is_told_with_the_command_that_opens_it(record):
    (found,) = [f for f in findings(record(**CASES["rows_apart"][0])) if f.title == "Rows wait for your word"]
    assert "9 rows of c0: `fedweave resume runs/x living.notice=open` opens" in found.text
    ended = record(events=[*CASES["rows_apart"][0]["events"], rounded(3)])
    assert any(
        "`fedweave resume runs/x living.notice=open training.rounds=5` opens" in f.text for f in findings(ended)
    )


def test_good_news_is_told_too(record):
    routing = {"a": [0.9, 0.1], "b": [0.1, 0.9]}
    good = outcome(sparse=1.0, soft=1.0, routing=routing)
    found = findings(record(summary=good, discovery=discovery(2), manifest={"tasks": {"a": "A"}}))
    assert {f.title for f in found if f.level == "good"} == {
        "One active expert is enough", "Every task has its own expert"
    }  # fmt: skip
    costly = findings(record(summary=outcome(sparse=1.3, soft=1.0), discovery=discovery(2)))
    assert [f.level for f in costly] == ["warning"] and "+30%" in costly[0].text


def test_no_expert_is_named_for_a_task_whose_prompts_are_strange(record):
    """B's prompts get no weight: it does not share the first expert with A, and has none of its own either."""
    routing = {"a": [0.9, 0.1], "b": [0.0, 0.0], "c": [0.1, 0.9]}
    run = record(summary=outcome(routing=routing), discovery=discovery(2), manifest={"tasks": {"b": "Sums"}})
    found = {f.title: f.text for f in findings(run)}
    assert "Sums (100%)" in found["Tasks that no expert answers"] and "Tasks share an expert" not in found
    assert "Every task has its own expert" not in found


@pytest.mark.parametrize(
    ("sparse", "soft", "said"),
    [(0.753, 0.739, "costs 1.9% of loss"), (0.739, 0.739, "nothing that shows"), (0.73, 0.739, "1.2% better")],
)
def test_what_one_active_expert_costs_is_said_as_it_is(record, sparse, soft, said):
    found = findings(record(summary=outcome(sparse=sparse, soft=soft), discovery=discovery(2)))
    assert [said in f.text for f in found if f.title == "One active expert is enough"] == [True]


def test_warnings_come_first_and_name_the_culprit(record):
    run = record(events=[*pulling(-0.5), *validations(1.0, expert_load=[1.0, 0.0])], manifest={"test": ["x"] * 10})
    found = findings(run)
    assert [f.level for f in found] == sorted([f.level for f in found], key=["warning", "note", "good"].index)
    assert any("odd (-0.50)" in f.text for f in found) and not any("plain" in f.text for f in found)
