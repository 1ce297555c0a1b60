"""Every kind of broken answer: refused with a name and a reason, and the model is the one of the others alone."""

import io
import json
import weakref
from types import SimpleNamespace

import pytest
import torch

from fedweave.cli import main
from fedweave.config import from_tree
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation import admission
from fedweave.federation.admission import Door, Receipts
from fedweave.federation.client import Client
from fedweave.federation.engines.base import Engine
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.federation.exit import Exit
from fedweave.federation.message import Message, Refused
from fedweave.federation.rounds import federate, one_round
from fedweave.federation.state import broadcast
from fedweave.federation.steps import Asked
from fedweave.federation.train import EXPERTS
from fedweave.methods import build_method
from fedweave.settings import to_tree
from tests.federations import make_engine, with_method

ROUNDS, BAD = 2, 1


def changed(config, **federation):
    """Two rounds, every client on its own: leaving one out then changes no bit of the others."""
    tree = to_tree(config)
    tree["training"] |= {"rounds": ROUNDS, "clients_per_step": 1}
    tree["federation"] |= federation
    return from_tree(tree)


class Tampered:
    """An engine in which one client's replies to a question are swapped for others."""

    def __init__(self, engine: InProcessEngine, tamper):
        self.engine, self.tamper = engine, tamper

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def ask(self, *args):
        return Engine.ask(self, *args)

    def hear(self, *args):
        return Engine.hear(self, *args)

    def replies(self, *args):
        for member, sealed in self.engine.replies(*args):
            if member.index != BAD:
                yield member, sealed
                continue
            for reply in self.tamper(sealed):
                if isinstance(reply, Message):
                    yield member, reply
                else:
                    yield reply


@pytest.fixture(scope="module")
def prepared():
    """(engine, state after preparation) of every method, made once: no test here is about preparation."""
    made = {}

    def get(config, backbone):
        if config.method not in made:
            engine = make_engine(config, backbone)
            made[config.method] = engine, build_method(config).prepare(engine)
        return made[config.method]

    yield get
    for engine, _ in made.values():
        engine.detach()


@pytest.fixture
def finish(backbone, prepared):
    """Call with a config to get (final state, reports, the console's warnings) of a whole federation."""

    def run(config, tamper=None):
        engine, state = prepared(config, backbone)
        engine.console, reports = Console(stream=io.StringIO()), []
        engine.config, engine.exit = config, Exit(config, engine.identity, travels=False)
        engine.restore([client.record() for client in engine.members], state.tensors())
        used = Tampered(engine, tamper) if tamper else engine
        rounds = range(config.training.rounds)
        try:
            final = federate(build_method(config), used, state, rounds, lambda _, report: reports.append(report))
        finally:
            engine.detach()
        said = engine.console.stream.getvalue().splitlines()  # slow rounds show their progress, too
        return final, reports, [line for line in said if line.startswith("warning: ")]

    return run


def with_tensors(reply, change):
    return Message(change(dict(reply.tensors)), reply.facts)


def with_facts(**facts):
    """A change of facts; a function makes the new value from the reply."""
    return lambda reply: Message(
        reply.tensors, reply.facts | {k: v(reply) if callable(v) else v for k, v in facts.items()}
    )


def first(tensors):
    return next(iter(tensors))


def spoil(value):
    def change(tensors):
        tensors[first(tensors)] = tensors[first(tensors)].clone()
        tensors[first(tensors)].view(-1)[3] = value
        return tensors

    return lambda reply: with_tensors(reply, change)


def swap(make):
    return lambda reply: with_tensors(reply, lambda a: a | {first(a): make(a[first(a)])})


def without(fact):
    return lambda reply: Message(reply.tensors, {k: v for k, v in reply.facts.items() if k != fact})


def unreadable():
    raise ValueError("144 bytes announce 2**60 numbers")


class Nonsense(dict):
    """Tensors that are none, to whoever looks closer."""

    def __contains__(self, name):
        raise TypeError("there is nothing here")


BROKEN = {
    "NaN": (spoil(float("nan")), "holds NaN or infinity"),
    "infinity": (spoil(float("inf")), "holds NaN or infinity"),
    "NaN router": (lambda r: with_tensors(r, lambda a: a | {"router": a["router"] * float("nan")}), "router holds"),
    "shape": (swap(lambda x: x[:-1]), "has shape"),
    "rank": (swap(lambda x: x[None]), "has shape"),
    "empty": (swap(lambda x: x[:0]), "has shape"),
    "dtype": (swap(lambda x: x.double()), "is float64, not float32"),
    "no tensor": (swap(lambda x: "text"), "cannot be read"),
    "missing": (lambda r: with_tensors(r, lambda a: {"router": a["router"]}), "is missing"),
    "extra": (lambda r: with_tensors(r, lambda a: a | {"expert.99": torch.ones(3)}), "was not asked for"),
    "backbone": (with_facts(backbone="other"), "its backbone is not"),
    "tokenizer": (with_facts(tokenizer="other"), "its tokenizer is not"),
    "no identity": (without("backbone"), "its backbone is not"),
    "norm": (swap(lambda x: x + 1e6), "its experts update has norm"),
    "samples": (with_facts(samples=10**9), "samples is 1000000000, where 1 to"),
    "no samples": (with_facts(samples=0), "samples is 0, where 1 to"),
    "text as samples": (with_facts(samples="many"), "samples is 'many', which is no number"),
    "counts": (with_facts(counts=lambda r: [1e12 for _ in r.facts["counts"]]), "counts is 1000000000000.0, where"),
    "half counts": (with_facts(counts=lambda r: [0.5 for _ in r.facts["counts"]]), "which is no whole number"),
    "negative counts": (with_facts(counts=lambda r: [-1.0 for _ in r.facts["counts"]]), "counts is -1.0, where"),
    "more experts": (with_facts(counts=lambda r: [*r.facts["counts"], 1.0]), "counts has"),
    "no list": (with_facts(counts=3), "counts is missing or no list"),
    "no counts": (with_facts(counts=lambda r: [0.0 for _ in r.facts["counts"]]), "for no expert"),
    "endless counts": (with_facts(counts=lambda r: [10**400 for _ in r.facts["counts"]]), "cannot be read"),
    "no tensors": (lambda r: Message({}, r.facts), "is missing"),
    "nonsense": (lambda r: Message(Nonsense(), r.facts), "cannot be read"),
    "losses": (with_facts(losses=[float("nan")]), "losses holds NaN or infinity"),
    "no losses": (with_facts(losses=[]), "losses has 0 entries"),
    "replay": (with_facts(t=lambda r: r.facts["t"] - 1), "another question than the open one"),
    "future": (with_facts(t=lambda r: r.facts["t"] + 7), "another question than the open one"),
    "another step": (with_facts(step="evaluate"), "another question than the open one"),
    "stranger": (lambda r: (SimpleNamespace(index=77, name="client_77"), lambda: r), "it was not asked"),
    "unreadable": (
        lambda r: (SimpleNamespace(index=BAD, name="client_1"), unreadable),
        "cannot be read (144 bytes",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_answer_is_refused_and_the_run_equals_one_without_it(kind, config, finish):
    config = changed(config)
    tamper, reason = BROKEN[kind]
    final, reports, warnings = finish(config, lambda reply: [tamper(reply)])
    expected, _, _ = finish(config, lambda reply: [])
    assert torch.equal(final.theta, expected.theta) and torch.equal(final.phi, expected.phi)
    assert len(reports) == ROUNDS and all(
        len(r.receipts.accepted) == 2 and len(r.receipts.refused) == 1 for r in reports
    )
    assert len(warnings) == ROUNDS and all(reason in line for line in warnings)
    assert warnings[1].startswith("warning: client") and "'s answer to round 2 was refused:" in warnings[1]
    if kind != "stranger":
        assert warnings[0].startswith("warning: client_1's answer to round 1")


@pytest.mark.parametrize(
    ("dtype", "name", "value"),
    [("bfloat16", "router", float("nan")), ("int8", "router.scale", float("nan")), ("int8", "router.scale", 1e30)],
)
def test_numbers_hidden_in_a_smaller_dtype_are_checked_too(dtype, name, value, config, finish):
    """A NaN in bfloat16, a NaN as scale, a scale that makes a wild update of small integers."""
    config = changed(config, update_dtype=dtype)
    tamper = lambda p: [with_tensors(p, lambda a: a | {name: torch.full_like(a[name], value)})]  # noqa: E731
    final, reports, _ = finish(config, tamper)
    assert all(len(r.receipts.refused) == 1 and "router" in r.receipts.refused[0][1] for r in reports)
    assert torch.isfinite(final.phi).all()
    _, reports, _ = finish(config, lambda p: [with_tensors(p, lambda a: {k: v.float() for k, v in a.items()})])
    assert all("is float32, not " in r.receipts.refused[0][1] for r in reports)


def test_numbers_are_looked_at_one_by_one_only_where_a_sum_of_squares_is_none(config, finish, monkeypatch):
    """A GPU would be waited for with every look."""
    looked, real = [], admission.check_finite
    monkeypatch.setattr(admission, "check_finite", lambda name, x: looked.append(name) or real(name, x))
    finish(changed(config))
    assert not looked
    finish(changed(config), lambda reply: [spoil(float("inf"))(reply)])
    assert len(looked) == ROUNDS and looked[0].startswith("expert.")


def test_lengths_are_measured_from_where_they_are_to_be():
    values = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[1.0, 2.0], [1.0, 3.0]]), "c": torch.tensor([7])}
    origins = {"a": None, "b": torch.tensor([1.0, 1.0]), "c": None}
    assert admission.squared_lengths(values, origins) == {"a": 25.0, "b": 5.0}
    assert admission.squared_lengths({}, {}) == {}


def test_an_answer_that_comes_twice_counts_once(config, finish):
    config = changed(config)
    plain, _, _ = finish(config)
    final, reports, warnings = finish(config, lambda reply: [reply, reply])
    assert torch.equal(final.theta, plain.theta) and torch.equal(final.phi, plain.phi)
    assert all(len(r.receipts.accepted) == 3 for r in reports) and len(warnings) == ROUNDS
    assert all("accepted already" in line for line in warnings)


def test_a_second_answer_stands_in_for_a_broken_first(config, finish):
    config = changed(config)
    plain, _, _ = finish(config)
    final, reports, _ = finish(config, lambda reply: [spoil(float("nan"))(reply), reply])
    assert torch.equal(final.theta, plain.theta) and all(len(r.receipts.accepted) == 3 for r in reports)


def test_a_long_update_is_clipped_when_asked(config, finish):
    """Clipped to the limit it keeps its direction: the same as an answer that was just within it."""
    config = changed(config, long_updates="clip", norm_limit=0.01, norm_factor=0.0)
    final, reports, _ = finish(config)
    assert all(
        len(r.receipts.accepted) == 3 and set(r.receipts.clipped) == {"client_0", "client_1", "client_2"}
        for r in reports
    )
    assert all(norm == 0.01 for r in reports for norm in r.receipts.norms["experts"])
    longer = lambda p: [with_tensors(p, lambda a: {k: 100 * v for k, v in a.items()})]  # noqa: E731
    scaled, _, _ = finish(config, longer)
    torch.testing.assert_close(final.theta, scaled.theta, atol=1e-6, rtol=0)


def test_a_norm_that_overflows_has_no_direction_to_keep(config, finish):
    config = changed(config, long_updates="clip")
    _, reports, _ = finish(config, lambda reply: [swap(lambda x: torch.full_like(x, 3e38))(reply)])
    assert all("has norm inf" in r.receipts.refused[0][1] for r in reports)


def test_recent_rounds_bound_the_next_whatever_the_order(config, finish):
    """An update 50 times too long hides below the absolute limit, not below the recent median."""
    config = changed(config, norm_limit=1e9)
    longer = swap(lambda x: 50 * x)
    _, reports, warnings = finish(config, lambda p: [longer(p) if p.facts["t"] else p])
    assert [len(r.receipts.refused) for r in reports] == [0, 1] and "10 times the recent median" in warnings[0]
    _, reports, _ = finish(changed(config, norm_factor=0.0), lambda p: [longer(p) if p.facts["t"] else p])
    assert [len(r.receipts.refused) for r in reports] == [0, 0]


@pytest.mark.parametrize(("medians", "most"), [([0.0], 1e9), ([0.0, 2.0, 0.0], 20.0)])
def test_a_round_in_which_most_moved_nothing_bounds_nobody(config, medians, most):
    """As where a router sends all prompts to one expert: whoever has it would be refused ever after."""
    step = SimpleNamespace(reach=lambda *_: (1e9, "what steps reach"))
    door = Door(config, step, [], {}, torch.device("cpu"), Receipts(recent={EXPERTS: medians}))
    assert door._limit(None, EXPERTS, 1)[0] == most


def test_too_few_answers_repeat_the_round_then_stop_it(config, finish):
    config = changed(config, min_answers=3, repeats=2)
    plain, _, _ = finish(config)
    failures = iter([True, True, False, False])  # the third try of round 1 and the first of round 2 succeed
    final, _, warnings = finish(config, lambda p: [] if next(failures) else [p])
    assert torch.equal(final.theta, plain.theta)
    assert len([line for line in warnings if "round 1 got 2 of the 3" in line]) == 2
    with pytest.raises(UserError, match=r"round 1 got 2 of the 3 usable answers.*its backbone is not"):
        finish(config, lambda p: [without("backbone")(p)])


@pytest.mark.parametrize("method", ["fedit", "ffa-lora", "fedsa-lora", "fedlease", "local-only"])
def test_every_method_passes_the_same_gate(method, config, finish):
    config = changed(with_method(config, method))
    plain, reports, warnings = finish(config)
    assert all(len(r.receipts.accepted) == 3 and not r.receipts.refused for r in reports) and not warnings
    without, _, _ = finish(config, lambda p: [])
    broken, _, _ = finish(config, lambda p: [with_facts(samples=-1)(p)])
    assert torch.equal(without.theta, broken.theta)
    assert method == "local-only" or not torch.equal(plain.theta, broken.theta)


def test_a_run_logs_refusals_and_remembers_norms_over_a_resume(tmp_path, small, monkeypatch, capsys):
    """One client breaks in the second round; a resumed run still knows the norms of the first."""
    replies = InProcessEngine.replies

    def tampered(self, step, *args):
        for member, reply in replies(self, step, *args):
            if step.name == "train" and member.index == BAD and reply.facts["t"] == 1:
                reply = with_facts(samples=-1)(reply)
            yield member, reply

    monkeypatch.setattr(InProcessEngine, "replies", tampered)
    folder = tmp_path / "run"
    assert main(["run", "quickstart", *small, "training.rounds=1", f"output={folder}"]) == 0
    assert main(["resume", str(folder), "training.rounds=2"]) == 0
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [e for e in events if e["event"] == "round"]
    assert [len(e["refused"]) for e in rounds] == [0, 1]
    assert rounds[1]["refused"][0]["client"] == "client_1" and "samples is -1" in rounds[1]["refused"][0]["reason"]
    assert "warning: client_1's answer to round 2 was refused" in capsys.readouterr().err
    meta = json.loads((folder / "checkpoints" / "round-0002" / "meta.json").read_text())
    assert len(meta["norms"]["experts"]) == 2 and all(n > 0 for n in meta["norms"]["experts"])


def test_a_client_speaks_for_no_more_than_its_buckets_have(config, backbone, prepared):
    """It serves what alignment gave it: to claim another expert, or more of one, buys nothing."""
    config = changed(config)
    engine, state = prepared(config, backbone)
    method, question = build_method(config), broadcast(state, 0)
    member = engine.members[BAD]
    asked = [Asked(member, question, engine.layers, engine.width)]
    ((_, sent),) = engine.replies(method.train, asked, question)
    counts = [int(n) for n in sent.facts["counts"]]
    for m, most in enumerate(method.claims(member, len(counts))):
        assert counts[m] <= most <= len(member)
        if most < len(member):
            greedy = [*counts[:m], most + 1, *counts[m + 1 :]]
            with pytest.raises(
                Refused, match=f"it claims {most + 1} examples for expert {m}, where its buckets have"
            ):
                method.train.parts(asked[0], sent.facts | {"counts": greedy})


def test_the_server_never_holds_more_than_two_answers(config, prepared, backbone):
    """Fifty clients, one message at a time: the one that is looked at, and the one that is just being made."""
    config = changed(config)
    engine, state = prepared(config, backbone)
    method = build_method(config)
    question = broadcast(state, 0)
    asked = [Asked(engine.members[0], question, engine.layers, engine.width)]
    ((_, sent),) = engine.replies(method.train, asked, question)
    alive: list[weakref.ref] = []
    most = 0

    class Crowd(InProcessEngine):
        def replies(self, step, asked, question):
            nonlocal most
            for one in asked:
                message = Message({name: x.clone() for name, x in sent.tensors.items()}, sent.facts)
                alive.append(weakref.ref(message))
                most = max(most, sum(ref() is not None for ref in alive))
                yield one.member, message

    one = engine.members[0]
    clients = [Client(i, one.data, one.buckets, one.assignment) for i in range(50)]
    crowd = Crowd(backbone, clients, config, engine.console)
    _, report = one_round(method, crowd, state, crowd.members, 0)
    engine.detach()
    assert len(report.receipts.accepted) == len(alive) == 50 and most <= 2


@pytest.mark.parametrize(
    ("step", "change", "reason"),
    [
        (
            "discover",
            with_facts(sizes=lambda r: [5_000_000_000] * len(r.facts["sizes"])),
            "sizes is 5000000000, where",
        ),
        ("discover", with_facts(sizes=[1] * 4000), "sizes has 4000 entries"),
        (
            "discover",
            with_facts(silhouettes=lambda r: ["high"] * len(r.facts["silhouettes"])),
            "which is no number",
        ),
        ("discover", spoil(float("nan")), "signatures holds NaN"),
        ("discover", without("sizes"), "sizes is missing"),
        (
            "start",
            with_facts(buckets=lambda r: [2**62] * len(r.facts["buckets"])),
            "buckets is 4611686018427387904",
        ),
        ("start", swap(lambda x: x + 1e3), "the farthest that the warmup's steps can lead"),
        ("start", with_facts(experts=lambda r: [9] * len(r.facts["experts"])), "other experts than its buckets"),
        ("warm", swap(lambda x: torch.full_like(x, 1e30)), "the farthest that the warm start's steps can lead"),
        ("warm", with_facts(samples=10**6), "samples is 1000000, where"),
        ("evaluate", with_facts(total=-1e12), "total is -1000000000000.0, where"),
        ("evaluate", with_facts(count=2**63), "count is 9223372036854775808, where"),
    ],
)
def test_every_step_passes_the_same_door(step, change, reason, config, backbone):
    """Discovery, starts, warm start and evaluation: what is wrong costs its sender alone, and the rest goes on."""
    tree = to_tree(changed(config))
    tree["router"]["warm_start"]["contrast"] = "all"  # every client is asked
    config = from_tree(tree)
    engine, said = make_engine(config, backbone), io.StringIO()
    engine.console, method = Console(stream=said), build_method(config)
    for client in engine.members:
        client.held = client.data
    asked = []

    def tamper(reply):
        asked.append(reply.facts["step"])
        return [change(reply) if reply.facts["step"] == step else reply]

    tampered = Tampered(engine, tamper)
    tampered.only = lambda found: Engine.only(engine, found)
    state = method.prepare(tampered)
    asking = tampered.ask(method.evaluate, engine.members, broadcast(state, 0))
    losses = {client.name: loss for client, loss in asking}
    engine.detach()
    assert step in asked and reason in said.getvalue()
    assert f"client_1's answer to {step!r} was refused: " in said.getvalue()
    assert torch.isfinite(state.theta).all() and torch.isfinite(state.phi).all() and "client_0" in losses
    assert ("client_1" in losses) == (step not in ("discover", "evaluate"))
