"""Smaller updates: what they weigh, that rounding is not lost, and that training comes out the same."""

import json

import pytest
import torch

from fedweave.cli import main
from fedweave.config import from_tree
from fedweave.federation.admission import Door, Receipts
from fedweave.federation.client import Client, Memory
from fedweave.federation.exit import Exit
from fedweave.federation.message import GROUP, Message, decode, encode, encoded_specs, tensor_bytes
from fedweave.federation.rounds import federate
from fedweave.federation.state import broadcast
from fedweave.federation.steps import Asked
from fedweave.methods import build_method
from fedweave.runs.folder import RunFolder
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


def leaving(memory: Memory, t: int, part: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """One part through the rounding of the exit, in round t."""
    config = from_tree({"federation": {"update_dtype": dtype}})
    client = Client(0, None, memory=memory)
    memory.begin(t)
    return Exit(config, {}, travels=True)._rounded(client, "x", part)


@pytest.mark.parametrize("dtype", SMALLER)
def test_what_rounding_takes_comes_back(dtype):
    """A thousand small pushes beside large ones: their sum arrives, within one rounding, although each alone would
    be rounded away."""
    push = torch.tensor([1.0] + [1e-4] * 3)  # 1e-4 is less than half a step of int8
    memory, plain, total = Memory(), torch.zeros(4), torch.zeros(4)
    for t in range(1000):
        total += decode("x", leaving(memory, t, push, dtype), dtype)
        plain += decode("x", encode("x", push, dtype), dtype)
    assert (total - 1000 * push).abs().max() <= 1 / 127 + 1e-3
    if dtype == "int8":
        assert not plain[1:].any(), "without the memory the small ones are lost"


def test_a_repeated_round_is_the_same_and_a_nan_does_not_stay():
    memory, part = Memory(), torch.randn(300, generator=torch.Generator().manual_seed(1))
    leaving(memory, 0, part, "int8")
    first, again = leaving(memory, 1, part, "int8"), leaving(memory, 1, part, "int8")
    assert all(torch.equal(first[name], again[name]) for name in first)
    leaving(memory, 2, part * float("nan"), "int8")
    assert torch.isfinite(decode("x", leaving(memory, 3, part, "int8"), "int8")).all()


@pytest.mark.parametrize("dtype", SMALLER)
def test_factors_that_take_turns_are_owed_their_own(dtype, config, backbone):
    """RoLoRA sends B in one round and A in the next, under one name: what rounding took from B is B's."""
    config, owed = with_method(config, "rolora"), []
    for rounds in (1, 2, 3):
        _, final, _, _ = train(config, backbone, dtype, rounds)
        _, full, _, _ = train(config, backbone, "float32", rounds)
        owed.append((final.theta - full.theta).norm() / (full.theta - full.layout.initial(config.seed)).norm())
    assert max(owed) < 0.02
    memory, b, a = Memory(), torch.tensor([1.0, 1e-4]), torch.tensor([-1.0, 0.0])
    client = Client(0, None, memory=memory)
    exit_ = Exit(from_tree({"federation": {"update_dtype": "int8"}}), {}, travels=True)
    for t, (part, turn) in enumerate([(b, "B"), (a, "A"), (b, "B"), (a, "A")]):
        memory.begin(t)
        sent = decode("x", exit_._rounded(client, "x", part, turn), "int8")
        assert turn == "B" or not sent[1], "nothing of B"
    assert memory.after["residual.x.B"][1] == pytest.approx(2e-4)


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
    assert not any(report.receipts.refused for report in reports)
    return state, final, [r.train_loss for r in reports], reports[0].receipts.bytes_up


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


def answers(engine, method, state) -> list[Message]:
    question = broadcast(state, 0)
    asked = [Asked(client, question, engine.layers, engine.width) for client in engine.members]
    return [message for _, message in engine.answers(method.train, asked, question)]


def test_a_client_sends_the_experts_that_it_serves(config, backbone):
    engine = make_engine(config, backbone)
    method = build_method(config)
    state = method.prepare(engine)
    messages = answers(engine, method, state)
    engine.detach()
    single = state.layout.with_experts(1).size
    for client, message in zip(engine.members, messages, strict=True):
        served = {f"expert.{m}" for m in client.assignment}
        assert set(message.tensors) == served | {"router"}
        size = 4 * (len(served) * single + state.router.trained.size)
        assert message.size == tensor_bytes(message.tensors.values()) == size
    moved = state.layout.size + state.router.trained.size
    assert method.train.broadcast_size(state.layout, state.router, 0) == 4 * moved
    assert any(len(set(client.assignment)) < state.layout.experts for client in engine.members)


def test_a_resumed_run_remembers_its_residuals_and_counts_bytes(tmp_path, small):
    settings = [*small, "federation.update_dtype=int8", "discovery.sketch=16", "experts.dropout=0.0"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["run", "quickstart", *settings, "training.rounds=2", f"output={whole}", "--quiet"]) == 0
    assert main(["run", "quickstart", *settings, "training.rounds=1", f"output={broken}", "--quiet"]) == 0
    assert main(["resume", str(broken), "training.rounds=2", "--quiet"]) == 0
    states = [RunFolder(folder).newest(2).tensors for folder in (whole, broken)]
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
def test_an_update_survives_the_wire(config, backbone, dtype):
    """As bytes and back: the same tensors, and the door still lets it in."""
    tree = to_tree(config)
    tree["federation"]["update_dtype"] = dtype
    config = from_tree(tree)
    engine, method = make_engine(config, backbone), build_method(config)
    state = method.prepare(engine)
    sent, receipts, question = answers(engine, method, state), Receipts(), broadcast(state, 0)
    engine.detach()
    came = [Message.from_bytes(message.to_bytes()) for message in sent]
    for message, copy in zip(sent, came, strict=True):
        assert message.tensors.keys() == copy.tensors.keys() and message.size == copy.size
        assert all(torch.equal(message.tensors[name], copy.tensors[name]) for name in message.tensors)
    asked = [Asked(client, question, engine.layers, engine.width) for client in engine.members]
    door = Door(config, method.train, asked, backbone.identity, engine.device, receipts)
    read = [door.admit(c, lambda m=m: m, print) for c, m in zip(engine.members, came, strict=True)]
    assert len(receipts.accepted) == len(engine.members) and not receipts.refused
    assert all(update.delta_theta.any() for update in read)


def test_a_site_that_restarts_knows_what_it_owes():
    memory, part = Memory(), torch.randn(300, generator=torch.Generator().manual_seed(1))
    for t in range(3):
        leaving(memory, t, part, "int8")
    again = Memory()
    again.load({name: tensor.clone() for name, tensor in memory.tensors().items()}, memory.round, memory.pace)
    for t in (2, 3):  # the last round once more, or the next
        ours, theirs = leaving(memory, t, part, "int8"), leaving(again, t, part, "int8")
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_lower_pace_forgets_what_rounding_took_before():
    memory, part = Memory(), torch.randn(300, generator=torch.Generator().manual_seed(1))
    leaving(memory, 0, part, "int8")
    memory.begin(1, 1.0)
    assert memory.before
    memory.begin(2, 0.5)
    assert not memory.before
