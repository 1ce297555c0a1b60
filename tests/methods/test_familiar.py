"""Which prompts are familiar: learned from sums over clients, and as strict as was asked for."""

import io
from dataclasses import replace

import pytest
import torch

from fedweave.config import load_config
from fedweave.console import Console
from fedweave.federation.admission import Receipts
from fedweave.federation.message import Message, Refused
from fedweave.methods import build_method
from fedweave.methods.familiar import (
    Moments,
    count_far,
    crossed,
    distance,
    familiar_share,
    farther,
    fit,
    possible,
    reach,
    spanned,
    together,
)  # fmt: skip
from fedweave.router.mlp import outside
from tests.federations import changed, make_engine
from tests.methods.test_weave import prepared, weave


def test_a_prompt_like_none_before_gets_the_shared_part_alone(config, backbone):
    engine, method, state = prepared(weave(config, router__familiar=0.5), backbone)
    engine.detach()
    features = torch.cat([client.data.features for client in engine.members])
    known = state.weights(features).any(1)
    assert 0.5 <= known.float().mean() < 1
    noise = torch.randn(8, features.shape[1], generator=torch.Generator().manual_seed(3))
    odd = state.weights(features[:8] + 20 * features.std(0) * noise)
    assert not odd.any() and not state.gates(odd, "sparse").any()
    client = engine.members[0]
    assert torch.equal(method.lane(client, state, 0).gates.any(1), known[: len(client)])
    assert torch.equal(method.labels(client, state), build_method(weave(config)).labels(client, state))


def test_what_is_familiar_comes_from_sums_over_clients(config, backbone):
    """What the server makes of sums is what one place would make of all features."""
    engine, _, state = prepared(weave(config, router__familiar=0.9), backbone)
    engine.detach()
    telling = [client for client in engine.members if len(client) >= 10]  # sums of a few would be nearly features
    assert 0 < len(telling) < len(engine.members)
    x = torch.cat([client.data.features for client in telling]).double()
    z = (x - x.mean(0)) / x.std(0, correction=0)
    axes = torch.linalg.svd(z, full_matrices=False).Vh[: state.router.axes]  # [k, d]
    outside = (z.square().sum(1) - (z @ axes.T).square().sum(1)) / z.norm(dim=1)
    found = state.router.strangeness(state.phi[0], x.float()).double()
    torch.testing.assert_close(found, outside, atol=1e-3, rtol=1e-3)


def test_who_has_no_expert_yet_tells_nothing(config, backbone):
    engine, method, _ = prepared(weave(config, router__familiar=0.9), backbone)
    engine.detach()
    client = max(engine.members, key=len)
    client.assignment = [-1] * len(client.assignment)  # all of it is kept apart
    (answer,) = method.familiar.moments.answer(engine.compute, [client], Message())
    assert answer.figures == {"samples": 0} and not any(part.any() for part in answer.parts.values())


def test_a_site_that_tells_of_nothing_does_not_spoil_the_router(config, backbone):
    """Of two sites the shorter features would be the median: the other's would be scaled down to these."""
    engine, method, state = prepared(weave(config, router__familiar=0.9), backbone)
    largest = sorted(engine.members, key=len)[-2:]
    engine.members = largest
    assert len(largest[0]) >= 10
    largest[0].data = replace(largest[0].data, features=torch.zeros_like(largest[0].data.features))
    taught = method.familiar.taught(engine, state, Receipts())
    engine.detach()
    assert taught.phi.isfinite().all() and taught.router.axes, "it is refused, and the other tells alone"


def test_by_default_it_is_on_where_it_works_and_nothing_forbids_it():
    assert [familiar_share(load_config(name)) for name in ("quickstart", "own", "weave")] == [0.98] * 3
    assert [familiar_share(load_config(name)) for name in ("paper", "benchmark")] == [1.0] * 2


def test_with_privacy_every_prompt_gets_an_expert_and_that_is_said(config, backbone):
    private = changed(config, privacy={"level": "client"}, discovery={"max_buckets": 1, "sketch": 4})
    engine, method = make_engine(private, backbone), build_method(private)
    engine.console = Console(stream=io.StringIO())
    state = method.prepare(engine)
    engine.detach()
    assert not state.router.axes and {"moments", "distances"}.isdisjoint(step.name for step in method.steps())
    assert "every prompt gets an expert" in engine.console.stream.getvalue()


def test_the_limit_is_so_many_times_as_far_out(config, backbone):
    limits = []
    for doubt in (1.0, 1.5):
        engine, _, state = prepared(weave(config, router__familiar=0.9, router__doubt=doubt), backbone)
        engine.detach()
        limits.append(float(state.router.views(state.phi[0])["familiar.limit"]))
    assert limits[1] == pytest.approx(1.5 * limits[0])


def told(x: torch.Tensor) -> Moments:
    """What a client tells of features [n, d]."""
    row, column = torch.triu_indices(x.shape[1], x.shape[1])
    halves = [x[::2], x[1::2]]
    return Moments(
        torch.tensor([len(half) for half in halves]),
        torch.stack([half.sum(0) for half in halves]),
        torch.stack([(half.T @ half)[row, column] for half in halves]),
    )


def test_moments_add_up_and_no_site_speaks_louder_than_four():
    random = torch.Generator().manual_seed(1)
    features = [torch.randn(12, 6, generator=random, dtype=torch.float64) for _ in range(70)]  # three helpings
    total, plain = together((1.0, told(x)) for x in features), told(torch.cat(features))
    for found, expected in zip(total, plain, strict=True):
        torch.testing.assert_close(found, expected, check_dtype=False)
    loud = [(1.0, told(100 * x if i == 40 else x)) for i, x in enumerate(features)]
    assert together(loud).products.abs().max() < 1.2 * plain.products.abs().max()
    assert together([(1.0, told(features[0][:0]))]) is None


def test_sums_that_features_have_are_possible():
    random = torch.Generator().manual_seed(4)
    x = torch.randn(12, 30, generator=random, dtype=torch.float64)
    flat = x * (torch.arange(30) > 1) + 7.0 * (torch.arange(30) == 0)  # two channels stand still
    for features in (x, 1e3 * x, 1e-3 * x, flat, x[:1].repeat(12, 1), x[:2], x[:0]):
        possible(told(features))


def contrary(honest: Moments) -> torch.Tensor:
    """Every channel against every other: each pair of them could be so, three cannot."""
    row, column = torch.triu_indices(6, 6)
    roots = honest.products[:, row == column].sqrt()
    return torch.where(row == column, 1.0, -1.0) * roots[:, row] * roots[:, column]


LIES = {
    "nothing": lambda m: m._replace(sums=0 * m.sums, products=0 * m.products),
    "next to nothing": lambda m: m._replace(sums=1e-80 * m.sums, products=1e-160 * m.products),
    "beyond all": lambda m: m._replace(sums=1e80 * m.sums, products=1e160 * m.products),
    "long sums": lambda m: m._replace(sums=100 * m.sums),
    "other signs": lambda m: m._replace(products=-m.products),
    "no rows": lambda m: m._replace(rows=0 * m.rows),
    "contrary": lambda m: m._replace(sums=0 * m.sums, products=contrary(m)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_sums_that_no_features_have_are_refused(lie):
    honest = told(torch.randn(12, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64))
    with pytest.raises(Refused, match="features"):
        possible(lie(honest))


def test_new_prompts_lie_within_the_limit_as_often_as_was_asked_for():
    """Prompts of a narrow cloud, a tenth of them with much noise: far more new ones than asked for lie beyond what
    those that were fitted would tell, and about as many beyond the limit."""
    random = torch.Generator().manual_seed(0)
    mixing = torch.randn(40, 8, generator=random, dtype=torch.float64)

    def prompts(n: int) -> torch.Tensor:
        noise = torch.randn(n, 40, generator=random, dtype=torch.float64)
        loud = 1 + 2 * (torch.rand(n, 1, generator=random) < 0.1)
        return torch.randn(n, 8, generator=random, dtype=torch.float64) @ mixing.T + loud * noise

    def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean(0), x.T @ x / len(x)

    wrong, naive, ratios = [], [], []
    for _ in range(20):
        known, new = prompts(120), prompts(2000)
        span = fit(*moments(known), 12)
        means, seconds = (torch.stack(part) for part in zip(*(moments(known[h::2]) for h in (0, 1)), strict=True))
        halves = [fit(means[h], seconds[h], 12) for h in (0, 1)]
        far = crossed(halves, means, seconds)
        assert distance(span, *moments(known)) == pytest.approx(span.distance)
        ratios.append(farther(halves, far) * span.distance / distance(span, *moments(new)))
        counts = count_far(known, spanned(halves), far)
        limit = reach(counts, 0.95) * span.distance * farther(halves, far)
        outer = outside(new, span.mean, span.scale, span.axes)
        wrong.append(float((outer > limit).double().mean()))
        fitted = outside(known, span.mean, span.scale, span.axes)
        naive.append(float((outer > fitted.quantile(0.95)).double().mean()))
    assert sum(naive) / 20 > 0.1 and sum(ratios) / 20 == pytest.approx(1, abs=0.15)
    assert sum(wrong) / 20 == pytest.approx(0.05, abs=0.02)
