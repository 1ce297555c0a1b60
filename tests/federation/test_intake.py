"""Every kind of broken answer: refused with a name and a reason, and the model is the one of the others alone."""

import dataclasses
import io
import json
import weakref

import pytest
import torch

from fedweave.cli import main
from fedweave.config import from_tree
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.client import Client
from fedweave.federation.engine import InProcessEngine
from fedweave.federation.rounds import federate, one_round
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
    """An engine in which one client's parcels are swapped for others."""

    def __init__(self, engine: InProcessEngine, tamper):
        self.engine, self.tamper = engine, tamper

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def answers(self, *args):
        for parcel in self.engine.answers(*args):
            yield from self.tamper(parcel) if parcel.client == BAD else [parcel]


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
        used = Tampered(engine, tamper) if tamper else engine
        rounds = range(config.training.rounds)
        try:
            final = federate(build_method(config), used, state, rounds, lambda _, report: reports.append(report))
        finally:
            engine.detach()
        said = engine.console.stream.getvalue().splitlines()  # slow rounds show their progress, too
        return final, reports, [line for line in said if line.startswith("warning: ")]

    return run


def with_arrays(parcel, change):
    return dataclasses.replace(parcel, arrays=change(dict(parcel.arrays)))


def first(arrays):
    return next(iter(arrays))


def spoil(value):
    def change(arrays):
        arrays[first(arrays)] = arrays[first(arrays)].clone()
        arrays[first(arrays)][3] = value
        return arrays

    return lambda parcel: with_arrays(parcel, change)


def swap(make):
    return lambda parcel: with_arrays(parcel, lambda a: a | {first(a): make(a[first(a)])})


class Nonsense(dict):
    """Arrays that are none, to whoever looks closer."""

    def __contains__(self, name):
        raise TypeError("there is nothing here")


REPLACE = dataclasses.replace
BROKEN = {
    "NaN": (spoil(float("nan")), "holds NaN or infinity"),
    "infinity": (spoil(float("inf")), "holds NaN or infinity"),
    "NaN router": (lambda p: with_arrays(p, lambda a: a | {"router": a["router"] * float("nan")}), "router holds"),
    "shape": (swap(lambda x: x[:-1]), "has shape"),
    "rank": (swap(lambda x: x[None]), "has shape"),
    "dtype": (swap(lambda x: x.double()), "is float64, not float32"),
    "missing": (lambda p: with_arrays(p, lambda a: {"router": a["router"]}), "is missing"),
    "extra": (lambda p: with_arrays(p, lambda a: a | {"expert.99": torch.ones(3)}), "was not asked for"),
    "backbone": (lambda p: REPLACE(p, identity=p.identity | {"backbone": "other"}), "its backbone is not"),
    "tokenizer": (lambda p: REPLACE(p, identity=p.identity | {"tokenizer": "other"}), "its tokenizer is not"),
    "no identity": (lambda p: REPLACE(p, identity=None), "its backbone is not"),
    "norm": (swap(lambda x: x + 1e6), "the farthest that the round's steps can lead"),
    "samples": (lambda p: REPLACE(p, samples=10**9), "claims 1000000000 examples"),
    "no samples": (lambda p: REPLACE(p, samples=0), "claims 0 examples"),
    "text as samples": (lambda p: REPLACE(p, samples="many"), "claims 'many' examples"),
    "counts": (lambda p: REPLACE(p, counts=[1e12 for _ in p.counts]), "examples for expert 0"),
    "negative counts": (lambda p: REPLACE(p, counts=[-1.0 for _ in p.counts]), "examples for expert 0"),
    "more experts": (lambda p: REPLACE(p, counts=[*p.counts, 1.0]), "it counts examples for"),
    "no counts": (lambda p: REPLACE(p, counts=[0.0 for _ in p.counts]), "for no expert"),
    "endless counts": (lambda p: REPLACE(p, counts=[10**400 for _ in p.counts]), "cannot be read"),
    "no arrays": (lambda p: REPLACE(p, arrays={}), "is missing"),
    "nonsense": (lambda p: REPLACE(p, arrays=Nonsense()), "cannot be read"),
    "losses": (lambda p: REPLACE(p, losses=[float("nan")]), "losses are missing"),
    "replay": (lambda p: REPLACE(p, round=p.round - 1), "which is not the open one"),
    "future": (lambda p: REPLACE(p, round=p.round + 7), "which is not the open one"),
    "stranger": (lambda p: REPLACE(p, client=77), "it was not asked in this round"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_answer_is_refused_and_the_run_equals_one_without_it(kind, config, finish):
    config = changed(config)
    tamper, reason = BROKEN[kind]
    final, reports, warnings = finish(config, lambda parcel: [tamper(parcel)])
    expected, _, _ = finish(config, lambda parcel: [])
    assert torch.equal(final.theta, expected.theta) and torch.equal(final.phi, expected.phi)
    assert len(reports) == ROUNDS and all(len(r.accepted) == 2 and len(r.refused) == 1 for r in reports)
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
    tamper = lambda p: [with_arrays(p, lambda a: a | {name: torch.full_like(a[name], value)})]  # noqa: E731
    final, reports, _ = finish(config, tamper)
    assert all(len(r.refused) == 1 and "router" in r.refused[0][1] for r in reports)
    assert torch.isfinite(final.phi).all()
    _, reports, _ = finish(config, lambda p: [with_arrays(p, lambda a: {k: v.float() for k, v in a.items()})])
    assert all("is float32, not " in r.refused[0][1] for r in reports)


def test_an_answer_that_comes_twice_counts_once(config, finish):
    config = changed(config)
    plain, _, _ = finish(config)
    final, reports, warnings = finish(config, lambda parcel: [parcel, parcel])
    assert torch.equal(final.theta, plain.theta) and torch.equal(final.phi, plain.phi)
    assert all(len(r.accepted) == 3 for r in reports) and len(warnings) == ROUNDS
    assert all("accepted already" in line for line in warnings)


def test_a_second_answer_stands_in_for_a_broken_first(config, finish):
    config = changed(config)
    plain, _, _ = finish(config)
    final, reports, _ = finish(config, lambda parcel: [spoil(float("nan"))(parcel), parcel])
    assert torch.equal(final.theta, plain.theta) and all(len(r.accepted) == 3 for r in reports)


def test_a_long_update_is_clipped_when_asked(config, finish):
    """Clipped to the limit it keeps its direction: the same as an answer that was just within it."""
    config = changed(config, long_updates="clip", norm_limit=0.01, norm_factor=0.0)
    final, reports, _ = finish(config)
    assert all(len(r.accepted) == 3 and set(r.clipped) == {"client_0", "client_1", "client_2"} for r in reports)
    assert all(norm == 0.01 for r in reports for norm in r.norms["experts"])
    longer = lambda p: [with_arrays(p, lambda a: {k: 100 * v for k, v in a.items()})]  # noqa: E731
    scaled, _, _ = finish(config, longer)
    torch.testing.assert_close(final.theta, scaled.theta, atol=1e-6, rtol=0)


def test_a_norm_that_overflows_has_no_direction_to_keep(config, finish):
    config = changed(config, long_updates="clip")
    _, reports, _ = finish(config, lambda parcel: [swap(lambda x: torch.full_like(x, 3e38))(parcel)])
    assert all("has norm inf" in r.refused[0][1] for r in reports)


def test_recent_rounds_bound_the_next_whatever_the_order(config, finish):
    """An update 50 times too long hides below the absolute limit, not below the recent median."""
    config = changed(config, norm_limit=1e9)
    longer = swap(lambda x: 50 * x)
    _, reports, warnings = finish(config, lambda p: [longer(p) if p.round else p])
    assert [len(r.refused) for r in reports] == [0, 1] and "10 times the recent median" in warnings[0]
    _, reports, _ = finish(changed(config, norm_factor=0.0), lambda p: [longer(p) if p.round else p])
    assert [len(r.refused) for r in reports] == [0, 0]


def test_too_few_answers_repeat_the_round_then_stop_it(config, finish):
    config = changed(config, min_answers=3, repeats=2)
    plain, _, _ = finish(config)
    failures = iter([True, True, False, False])  # the third try of round 1 and the first of round 2 succeed
    final, _, warnings = finish(config, lambda p: [] if next(failures) else [p])
    assert torch.equal(final.theta, plain.theta)
    assert len([line for line in warnings if "round 1 got 2 of the 3" in line]) == 2
    with pytest.raises(UserError, match=r"round 1 got 2 of the 3 usable answers.*its backbone is not"):
        finish(config, lambda p: [REPLACE(p, identity={})])


@pytest.mark.parametrize("method", ["fedit", "ffa-lora", "fedsa-lora", "fedlease", "local-only"])
def test_every_method_passes_the_same_gate(method, config, finish):
    config = changed(with_method(config, method))
    plain, reports, warnings = finish(config)
    assert all(len(r.accepted) == 3 and not r.refused for r in reports) and not warnings
    without, _, _ = finish(config, lambda p: [])
    broken, _, _ = finish(config, lambda p: [REPLACE(p, samples=-1)])
    assert torch.equal(without.theta, broken.theta)
    assert method == "local-only" or not torch.equal(plain.theta, broken.theta)


def test_a_run_logs_refusals_and_remembers_norms_over_a_resume(tmp_path, small, monkeypatch, capsys):
    """One client breaks in the second round; a resumed run still knows the norms of the first."""
    answers = InProcessEngine.answers

    def tampered(self, *args):
        for parcel in answers(self, *args):
            yield REPLACE(parcel, samples=-1) if parcel.client == BAD and parcel.round == 1 else parcel

    monkeypatch.setattr(InProcessEngine, "answers", tampered)
    folder = tmp_path / "run"
    assert main(["run", "quickstart", *small, "training.rounds=1", f"output={folder}"]) == 0
    assert main(["resume", str(folder), "training.rounds=2"]) == 0
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [e for e in events if e["event"] == "round"]
    assert [len(e["refused"]) for e in rounds] == [0, 1]
    assert rounds[1]["refused"][0]["client"] == "client_1" and "claims -1" in rounds[1]["refused"][0]["reason"]
    assert "warning: client_1's answer to round 2 was refused" in capsys.readouterr().err
    meta = json.loads((folder / "checkpoints" / "round-0002" / "meta.json").read_text())
    assert len(meta["norms"]["experts"]) == 2 and all(n > 0 for n in meta["norms"]["experts"])


def test_the_server_never_holds_more_than_two_answers(config, prepared, backbone):
    """Fifty clients, one parcel at a time: the one that is looked at, and the one that is just being made."""
    config = changed(config)
    engine, state = prepared(config, backbone)
    method = build_method(config)
    sealed = next(engine.answers(method, state, engine.clients[:1], 0, method.courier(state)))
    alive: list[weakref.ref] = []
    most = 0

    class Crowd(InProcessEngine):
        def answers(self, method, state, participants, t, courier):
            nonlocal most
            for client in participants:
                copies = {name: array.clone() for name, array in sealed.arrays.items()}
                parcel = REPLACE(sealed, client=client.index, arrays=copies)
                alive.append(weakref.ref(parcel))
                most = max(most, sum(ref() is not None for ref in alive))
                yield parcel

    clients = [Client(i, engine.clients[0].data) for i in range(50)]
    crowd = Crowd(backbone, clients, config, engine.console)
    _, report = one_round(method, crowd, state, crowd.clients, 0)
    engine.detach()
    assert len(report.accepted) == len(alive) == 50 and most <= 2
