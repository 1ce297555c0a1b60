"""Verdicts say what the figures mean, and change when the figures do."""

import copy

import pytest

from fedweave.analysis.verdicts import render, verdicts

PART = {
    "norms": [1.0, 1.0], "cosines": [[1.0, -0.5], [-0.5, 1.0]], "clients": {"a": {"gamma": 0.1, "cancelled": 0.2}},
    "buckets": {"a": [{"gamma": 0.01, "cancelled": 0.02, "off_dominant": 0.02, "bound": 0.03}]},
    "client_cancelled": 0.2, "bucket_cancelled": 0.02, "bound_holds": True,
}  # fmt: skip
PATHS = {
    "rate": 0.1, "heterogeneity": 1.0, "order_bias": [1.0], "net_order_bias": 0.1, "dispersion": [0.0, 0.01],
    "consensus_error": [0.0], "smoothness": 2.0, "loss_start": 1.0, "loss_persistent": 0.8, "loss_reset": 0.9,
    "order_term": 0.05, "consensus_term": 0.0, "first_step_ratio": 1.0, "consensus_bound_holds": True,
}  # fmt: skip
RISK = {
    "examples": 4, "oracle": 1.0, "excess": 0.1, "margin_bound": 0.2, "bound": 0.4, "calibrated": True,
    "chain_holds": True,
}  # fmt: skip
FOUND = {
    "method": "fedweave", "round": 2, "rounds": 2, "experts": 2, "patterns": ["sum", "edit"], "refused": {},
    "sample": {"clients": ["a"], "of_clients": 3, "batches": 1, "batch_size": 4},
    "conflict": {"fresh_adapter": PART, "merged_experts": PART},
    "contamination": {
        "clean": True, "target": ["sum", "edit"], "client_mixture": [0.5, None],
        "rounds": {"2": {"chi": [0.02, 0.04], "local": [0.01, 0.0], "misalignment": [0.0, 0.0],
                         "leakage": [0.01, 0.04], "client": [0.1, 0.1], "lemma_holds": True}},
    },
    "effective_budget": {"budget": [0.1, 0.1], "mean_weight": [0.5, 0.4], "weight_by_round": {"2": [0.5, 0.4]}},
    "router_paths": {"steps": 1, "rate": 0.1, "clients": {"a": PATHS}},
    "routing_risk": {
        "deficit": 0.03, "margin_risk": 0.01,
        "clients": {
            "a": {"deficit": 0.03, "margin_risk": 0.01, "sparse": RISK}, "b": {"deficit": 0.0, "margin_risk": 0.0},
        },
    },
}  # fmt: skip


def judged(**changes):
    """The verdicts of FOUND with some values at dotted places changed, by section."""
    found = copy.deepcopy(FOUND)
    for place, value in changes.items():
        *parents, last = place.split("__")
        node = found
        for key in parents:
            node = node[key]
        node[last] = value
    return {v["about"]: v for v in verdicts(found)}


def test_a_healthy_run():
    assert {v["level"] for v in judged().values()} == {"good"}
    assert "cancel 20.0 % of a client's squared gradient, but 2.0 %" in judged()["conflict"]["text"]
    assert "at most 4.0 % (expert 1, edit, mostly from leaking routes)" in judged()["contamination"]["text"]
    assert "interleaved is ahead" in judged()["router_paths"]["text"]


@pytest.mark.parametrize(
    ("place", "value", "about", "level", "words"),
    [
        ("effective_budget__mean_weight", [0.9, 0.1], "effective_budget", "warning", "Starving: expert 1 (0.100)"),
        ("contamination__rounds__2__chi", [0.4, None], "contamination", "warning", "40.0 % (expert 0"),
        ("contamination__clean", False, "contamination", "good", "2 experts for 2 patterns"),
        ("conflict__merged_experts__client_cancelled", 0.0, "conflict", "note", "No two patterns"),
        ("conflict__merged_experts__bound_holds", False, "conflict", "warning", "must not happen"),
        ("router_paths__clients__a__loss_reset", 0.7, "router_paths", "note", "reset is ahead"),
        ("router_paths__clients__a__loss_reset", 0.8001, "router_paths", "note", "they are level"),
        ("router_paths__clients__a__smoothness", 30.0, "router_paths", "good", "3.0 times the largest"),
        ("router_paths__clients__a__first_step_ratio", 0.9, "router_paths", "warning", "must not happen"),
        ("router_paths__clients", {}, "router_paths", "note", "one bucket"),
        ("routing_risk__margin_risk", 0.5, "routing_risk", "warning", "50.0 % of its choices"),
        ("routing_risk__clients__a__sparse__calibrated", False, "routing_risk", "good", "no calibration"),
    ],
)
def test_what_turns_a_verdict(place, value, about, level, words):
    verdict = judged(**{place: value})[about]
    assert verdict["level"] == level and words in verdict["text"]


def test_a_settled_router_is_called_so():
    found = copy.deepcopy(FOUND)
    found["router_paths"]["clients"]["a"] |= {"loss_persistent": 1.0, "loss_reset": 1.0}
    assert "settled" in verdicts(found)[3]["text"]


def test_refusals_are_verdicts_too_and_everything_is_shown():
    found = {**FOUND, "refused": {"conflict": "needs task labels."}}
    del found["conflict"]
    found["verdicts"] = verdicts(found)
    text = render(found)
    assert "· conflict needs task labels." in text and "a sample of 1 of 3 clients" in text
    for word in ("expert 1", "effective budget", "router paths", "sparse excess"):
        assert word in text
