"""Smaller updates: what they weigh, that rounding is not lost, and that training comes out the same."""

import json

import pytest
import torch

from fedweave.cli import main
from fedweave.config import from_tree
from fedweave.federation.checkpoint import load_checkpoint
from fedweave.federation.compression import GROUP, Residuals, decode, encode, encoded_specs
from fedweave.federation.intake import Intake, RoundReport
from fedweave.federation.letters import Letter
from fedweave.federation.parcel import array_bytes
from fedweave.federation.rounds import federate
from fedweave.federation.wire import parcel_letter, read_parcel
from fedweave.methods import build_method
from fedweave.settings import to_tree
from tests.federations import make_engine, with_method

SMALLER = ["bfloat16", "int8"]


@pytest.mark.parametrize("dtype", ["float32", *SMALLER])
@pytest.mark.parametrize("size", [1, GROUP, 1000])
def test_encoding_is_as_announced_and_close(dtype, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-4
    arrays = encode("x", values, dtype)
    assert {k: (tuple(a.shape), a.dtype) for k, a in arrays.items()} == encoded_specs("x", size, dtype)
    back = decode("x", arrays, dtype)
    limit = {"float32": 0.0, "bfloat16": 2**-8, "int8": 1 / 127}[dtype]
    assert (back - values).abs().max() <= limit * values.abs().max()
    assert torch.equal(decode("x", encode("x", torch.zeros(size), dtype), dtype), torch.zeros(size))


@pytest.mark.parametrize("dtype", SMALLER)
def test_what_rounding_takes_comes_back(dtype):
    """A thousand small pushes beside large ones: their sum arrives, within one rounding, although each alone would
    be rounded away."""
    push = torch.tensor([1.0] + [1e-4] * 3)  # 1e-4 is less than half a step of int8
    memory, plain, total = Residuals(), torch.zeros(4), torch.zeros(4)
    for t in range(1000):
        total += decode("x", memory.encode(t, {"x": push}, dtype), dtype)
        plain += decode("x", encode("x", push, dtype), dtype)
    assert (total - 1000 * push).abs().max() <= 1 / 127 + 1e-3
    if dtype == "int8":
        assert not plain[1:].any(), "without the memory the small ones are lost"


def test_a_repeated_round_is_the_same_and_a_nan_does_not_stay():
    memory, part = Residuals(), {"x": torch.randn(300, generator=torch.Generator().manual_seed(1))}
    memory.encode(0, part, "int8")
    first, again = memory.encode(1, part, "int8"), memory.encode(1, part, "int8")
    assert all(torch.equal(first[name], again[name]) for name in first)
    memory.encode(2, {"x": part["x"] * float("nan")}, "int8")
    assert torch.isfinite(decode("x", memory.encode(3, part, "int8"), "int8")).all()


def train(config, backbone, dtype: str, rounds: int = 6):
    """(states before and after, mean training loss of every round, bytes that a client sent in a round)"""
    tree = to_tree(config)
    tree["federation"]["update_dtype"] = dtype
    config = from_tree(tree)
    engine, reports = make_engine(config, backbone), []
    method = build_method(config)
    state = method.prepare(engine)
    final = federate(method, engine, state, range(rounds), lambda _, report: reports.append(report))
    engine.detach()
    assert not any(report.refused for report in reports)
    return state, final, [r.train_loss for r in reports], reports[0].bytes_up


@pytest.mark.parametrize("dtype", SMALLER)
def test_training_converges_as_in_float32(config, backbone, dtype):
    """Every round's loss within a twentieth of the whole fall; the model far closer to float32's than it moved."""
    tree = to_tree(config)
    tree["training"]["local_steps"] = 8
    start, full, losses, bytes_full = train(from_tree(tree), backbone, "float32")
    _, small, smaller, bytes_small = train(from_tree(tree), backbone, dtype)
    fall = losses[0] - losses[-1]
    assert fall > 0.1 and all(abs(x - y) <= fall / 20 for x, y in zip(losses, smaller, strict=True))
    assert 0 < (small.theta - full.theta).norm() < 0.2 * (full.theta - start.theta).norm()
    share = {"bfloat16": 0.5, "int8": 0.25 * (1 + 4 / GROUP)}[dtype]
    for name, sent in bytes_full.items():
        assert bytes_small[name] == pytest.approx(share * sent, rel=0.01)


@pytest.mark.parametrize(
    ("method", "columns"), [("fedit", "all"), ("ffa-lora", "B"), ("fedsa-lora", "A"), ("local-only", "none")]
)
def test_bytes_are_what_the_method_shares(config, backbone, method, columns):
    config = with_method(config, method)
    state, _, _, sent = train(config, backbone, "float32", rounds=1)
    is_b = state.layout.is_b
    numbers = {"all": len(is_b), "B": int(is_b.sum()), "A": int((~is_b).sum()), "none": 0}[columns]
    assert set(sent.values()) == {4 * numbers}


def test_a_client_sends_the_experts_that_it_serves(config, backbone):
    engine = make_engine(config, backbone)
    method = build_method(config)
    state = method.prepare(engine)
    courier = method.courier(state)
    parcels = list(engine.answers(method, state, engine.clients, 0, courier))
    engine.detach()
    single = state.layout.with_experts(1).size
    for client, parcel in zip(engine.clients, parcels, strict=True):
        served = {f"expert.{m}" for m in client.assignment}
        assert set(parcel.arrays) == served | {"router"}
        assert parcel.bytes == array_bytes(parcel.arrays.values()) == 4 * (len(served) * single + state.router.size)
    assert courier.broadcast_bytes == 4 * (state.layout.size + state.router.size)
    assert any(len(set(client.assignment)) < state.layout.experts for client in engine.clients)


def test_a_resumed_run_remembers_its_residuals_and_counts_bytes(tmp_path, small):
    settings = [*small, "federation.update_dtype=int8", "discovery.sketch=16", "experts.dropout=0.0"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["run", "quickstart", *settings, "training.rounds=2", f"output={whole}", "--quiet"]) == 0
    assert main(["run", "quickstart", *settings, "training.rounds=1", f"output={broken}", "--quiet"]) == 0
    assert main(["resume", str(broken), "training.rounds=2", "--quiet"]) == 0
    states = [load_checkpoint(folder / "checkpoints" / "round-0002")[0] for folder in (whole, broken)]
    assert states[0].keys() == states[1].keys() and any(name.startswith("residual.") for name in states[0])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    figures = [json.loads((folder / "summary.json").read_text())["communication"] for folder in (whole, broken)]
    assert figures[0] == figures[1] and figures[0]["rounds_up"] < figures[0]["rounds_down"] / 3
    events = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    assert figures[0]["rounds_up"] == sum(sum(event["bytes_up"].values()) for event in rounds) > 0
    discovery = json.loads((whole / "discovery.json").read_text())
    assert figures[0]["before_up"] == sum(c["up"] for c in discovery["preparation_bytes"].values()) > 0


@pytest.mark.parametrize("dtype", ["float32", *SMALLER])
def test_a_parcel_survives_the_wire(config, backbone, dtype):
    """As a letter's bytes and back: the same arrays, and the intake still takes it."""
    tree = to_tree(config)
    tree["federation"]["update_dtype"] = dtype
    config = from_tree(tree)
    engine, method = make_engine(config, backbone), build_method(config)
    state = method.prepare(engine)
    courier, report = method.courier(state), RoundReport(0, engine.clients)
    sent = list(engine.answers(method, state, engine.clients, 0, courier))
    engine.detach()
    came = [read_parcel(Letter.from_bytes(parcel_letter(p).to_bytes()), p.client) for p in sent]
    for parcel, copy in zip(sent, came, strict=True):
        assert parcel.arrays.keys() == copy.arrays.keys() and parcel.bytes == copy.bytes
        assert all(torch.equal(parcel.arrays[name], copy.arrays[name]) for name in parcel.arrays)
    accepted = list(Intake(config, courier, backbone.identity, state, report).updates(came))
    assert len(accepted) == len(engine.clients) and not report.refused


def test_a_site_that_restarts_knows_what_it_owes():
    memory, part = Residuals(), {"x": torch.randn(300, generator=torch.Generator().manual_seed(1))}
    for t in range(3):
        memory.encode(t, part, "int8")
    again = Residuals()
    again.load({name: tensor.clone() for name, tensor in memory.tensors().items()}, memory.round)
    for t in (2, 3):  # the last round once more, or the next
        ours, theirs = memory.encode(t, part, "int8"), again.encode(t, part, "int8")
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
