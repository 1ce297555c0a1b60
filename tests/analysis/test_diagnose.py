"""Diagnosis of real (tiny) runs: what it measures agrees with the run, and it refuses what it cannot know."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedweave.analysis.diagnose import diagnose
from fedweave.analysis.gradients import GradientMeter
from fedweave.analysis.subject import open_subject
from fedweave.config import Config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.router.mlp import RouterLayout
from tests.helpers import contents, make_lanes, read_json, write_jsonl

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def plain(tiny_run, tmp_path_factory):
    """A run to be diagnosed: that leaves a file."""
    return shutil.copytree(tiny_run(), tmp_path_factory.mktemp("diagnosed") / "run")


@pytest.fixture(scope="module")
def diagnosed(plain):
    return diagnose(plain, QUIET, clients=2)


@pytest.fixture(scope="module")
def own_rows(tmp_path_factory):
    """Two clients' own data, whose rows carry no task."""
    data = tmp_path_factory.mktemp("data")
    for name, verb in (("north", "Add"), ("south", "Spell")):
        rows = [{"prompt": f"{verb} {i} and {i}", "response": str(2 * i)} for i in range(20)]
        write_jsonl(data / f"{name}.jsonl", rows)
    return ["data.source=jsonl", f"data.path={data}", "evaluation.scores=false"]


def test_everything_is_measured_and_written(diagnosed, plain):
    assert read_json(plain / "diagnostics.json") == diagnosed
    assert diagnosed["refused"] == {} and set(diagnosed["patterns"]) == {"edit", "sum", "mood", "choice"}
    assert diagnosed["sample"]["clients"] == ["client_0", "client_1"] and diagnosed["sample"]["of_clients"] == 3


def test_the_theorems_hold_on_a_real_model(diagnosed):
    assert all(part["bound_holds"] for part in diagnosed["conflict"].values())
    assert all(row["lemma_holds"] for row in diagnosed["contamination"]["rounds"].values())
    for paths in diagnosed["router_paths"]["clients"].values():
        assert paths["first_step_ratio"] == pytest.approx(1.0, rel=1e-4) and paths["heterogeneity"] > 0
        assert paths["consensus_bound_holds"] and paths["weight_mismatch_bound_holds"]
    risks = [c["sparse"] for c in diagnosed["routing_risk"]["clients"].values() if "sparse" in c]
    assert len(risks) == 2 and all(risk["chain_holds"] for risk in risks)


def test_routed_weight_sums_to_what_the_router_says(diagnosed, plain):
    """One expert's mean weight, from the router's own output and the schedule, without the [U, K, M] table."""
    subject = open_subject(plain, "best", QUIET)
    expected = np.zeros(subject.state.layout.experts)
    counts = np.stack([subject.method.counts(c, subject.state).numpy() for c in subject.clients])
    for client, row in zip(subject.clients, counts / counts.sum(0).clip(min=1), strict=True):
        gates = subject.gates(client, subject.state)
        budget = subject.step_budget(client)
        drawn = sum(n * gates[b].mean(0) for n, b in zip(budget, client.buckets, strict=True)) / sum(budget)
        expected += row * drawn
    by_round = diagnosed["effective_budget"]["weight_by_round"]
    assert by_round[str(diagnosed["round"])] == pytest.approx(expected.tolist(), rel=1e-5)


def test_gradients_are_those_of_finite_differences(backbone):
    engine = InProcessEngine(backbone, [], Config(), QUIET)
    layout, router = engine.layout(rank=2, experts=2), RouterLayout(backbone.width, 8, 2)
    lane = make_lanes(backbone, layout, router, clients=1, steps=2)[0]
    meter = GradientMeter(engine.compute, layout, router)
    found = meter([lane])
    for name, size in (("theta", layout.size), ("phi", router.size)):
        direction = torch.nn.functional.normalize(
            torch.randn(size, generator=torch.Generator().manual_seed(1)), dim=0
        )
        losses = []
        for sign in (1, -1):
            moved = replace(lane, **{name: getattr(lane, name) + sign * 1e-2 * direction})
            losses.append(float(meter([moved]).losses[0]))
        slope = (losses[0] - losses[1]) / 2e-2
        assert float(getattr(found, name)[0] @ direction) == pytest.approx(slope, rel=0.02, abs=2e-4)
    engine.detach()


def test_own_data_without_labels_gets_what_needs_none(tiny_copy, own_rows, says):
    folder = tiny_copy(*own_rows)
    shown = says("diagnose", folder, "--clients", "1")
    found = read_json(folder / "diagnostics.json")
    assert set(found["refused"]) == {"conflict", "contamination", "routing_risk"}
    assert "router_paths" in found and "effective_budget" in found
    assert shown.count("needs task labels") == 3


def test_single_adapter_runs_have_conflict_alone(tiny_copy):
    found = diagnose(tiny_copy("method=fedit"), QUIET, clients=2)
    assert set(found["refused"]) == {"contamination", "effective_budget", "router_paths", "routing_risk"}
    assert set(found["conflict"]) == {"fresh_adapter", "experts"}


def test_client_level_methods_are_diagnosed_with_their_own_units(tiny_copy):
    found = diagnose(tiny_copy("method=fedlease"), QUIET, clients=2)
    assert found["router_paths"]["clients"] == {}  # one bucket per client: nothing to interleave
    last = found["contamination"]["rounds"][str(found["rounds"])]
    assert last["lemma_holds"]


def test_whole_uploads_are_those_of_the_ablation_without_prototype_experts(tiny_copy):
    found = diagnose(tiny_copy("method=without-prototype-expert"), QUIET, clients=1)
    for row in found["contamination"]["rounds"].values():
        assert row["chi"] == pytest.approx(row["client"])


def test_an_oracle_routes_without_any_risk(tiny_copy):
    found = diagnose(tiny_copy("method=oracle", "evaluation.scores=false"), QUIET, clients=1)
    now = found["contamination"]["rounds"][str(found["round"])]
    assert max(now["chi"]) < 1e-6 and found["contamination"]["clean"]
    assert found["routing_risk"]["margin_risk"] == 0 and found["routing_risk"]["deficit"] < 1e-6


def test_diagnosis_leaves_the_run_as_it_was(tiny_copy):
    folder = tiny_copy()
    before = contents(folder)
    diagnose(folder, QUIET, clients=1, which="last")
    after = contents(folder)
    assert after.pop(folder / "diagnostics.json") and after == before


@pytest.mark.parametrize("argument", ["--clients", "--batches"])
def test_a_sample_of_nothing_is_refused(tiny_run, argument, complains):
    assert "must be at least 1" in complains("diagnose", tiny_run(), argument, "0")


def test_nothing_at_all_to_diagnose_is_one_sentence(tiny_copy, own_rows):
    with pytest.raises(UserError, match="there is nothing to diagnose"):
        diagnose(tiny_copy(*own_rows, "method=fedit"), QUIET, clients=1)


@pytest.mark.parametrize("which, kept", [("last", {2, 3}), ("best", {2, 3}), ("start", {0})])
def test_a_run_whose_experts_opened_is_diagnosed_with_the_buckets_of_its_round(tiny_copy, which, kept):
    changes = ["data.train=40", "data.changes=['2: all gain sum']"]
    folder = tiny_copy(*changes, "living.notice=open", "living.least=2", "living.alarms=0.5")
    subject = open_subject(folder, which, QUIET)
    assert set(subject.states) == kept and subject.anchor.max() < subject.state.layout.experts
    found = diagnose(folder, QUIET, clients=1, which=which)
    assert found["refused"] == {} and {*map(int, found["contamination"]["rounds"])} == kept
    assert ("sum" in found["patterns"]) is (which != "start"), "nobody had sums in the beginning"


def test_rows_that_wait_for_an_expert_are_left_aside(tiny_copy):
    folder = tiny_copy("data.changes=['2: all gain 30% of edit']", "living.notice=open", "living.least=1000")
    subject = open_subject(folder, "last", QUIET)
    waiting = [len(client.waiting) for client in subject.workspace.engine.members]
    assert any(waiting) and [len(c.data) for c in subject.clients] == [
        len(client.data) - n for client, n in zip(subject.workspace.engine.members, waiting, strict=True)
    ]
    assert diagnose(folder, QUIET, clients=1, which="last")["refused"] == {}


def test_a_client_that_claims_a_thousand_times_its_rows_is_diagnosed_by_those_that_it_has(tiny_copy):
    assert diagnose(tiny_copy("attack.kind=inflate"), QUIET, clients=3)["refused"] == {}
