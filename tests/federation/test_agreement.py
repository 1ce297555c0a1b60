"""Who pulls with the others: worked out by hand on a few clients."""

import pytest
import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.federation.agreement import Agreement
from fedweave.federation.train import Update

LAYOUT = AdapterLayout(("layer",), (8,), (8,), rank=2, experts=2)


def update(client: int, towards: torch.Tensor, counts: list[float]) -> Update:
    return Update(client, towards, torch.tensor(counts), None, int(sum(counts)), [1.0], 1)


def test_a_client_against_the_others_is_negative_and_a_lone_specialist_has_no_answer():
    step = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(1))
    expert0 = (LAYOUT.expert_of_column == 0).float()
    agreement = Agreement(LAYOUT)
    agreement.add(update(0, step, [10, 0]))
    agreement.add(update(1, 2 * step, [10, 0]))
    agreement.add(update(2, -step * expert0 + 1e6 * (1 - expert0), [5, 0]))  # its expert 1 is not uploaded
    agreement.add(update(3, step, [0, 7]))
    agreement.add(update(4, step, [1, 0]))
    cosines = agreement.cosines()
    assert all(cosines[client] == pytest.approx(1.0, abs=1e-5) for client in (0, 1, 4))
    assert cosines[2] == pytest.approx(-1.0, abs=1e-5), "what a client does not upload must not count"
    assert cosines[3] is None


def test_updates_come_from_their_device_together(monkeypatch):
    """A GPU is waited for once, however many clients there are and however often somebody asks."""
    fetched, real = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: fetched.append(x.shape) or real(x))
    generator, agreement = torch.Generator().manual_seed(1), Agreement(LAYOUT)
    for client in range(5):
        agreement.add(update(client, torch.randn(LAYOUT.size, generator=generator), [10, 5]))
    first = agreement.cosines(), agreement.against()
    assert (agreement.cosines(), agreement.against()) == first and len(fetched) == 1
    agreement.add(update(5, torch.ones(LAYOUT.size), [10, 5]))
    assert list(agreement.cosines()) == [*first[0], 5]


def test_buckets_of_one_expert_are_told_from_the_rest_of_their_client():
    layout = AdapterLayout(("layer",), (128,), (128,), rank=8, experts=2)
    step = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    expert0 = layout.expert_of_column == 0
    agreement = Agreement(layout)
    for client in range(3):
        agreement.add(update(client, step, [10, 10 if client < 2 else 0]))
    agreement.add(update(3, torch.where(expert0, -step, step), [10, 0]))
    against = agreement.against()
    assert [against[client] for client in range(4)] == [[False, None]] * 3 + [[True, None]], "two have no middle"
    assert Agreement(layout).against() == {}


@pytest.mark.parametrize(("length", "claim"), [(1, 1_000_000), (1000, 10)])
def test_who_claims_much_or_shouts_is_not_the_others(length, claim):
    """It would have the honest clients quarantined in its place."""
    step = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(1))
    agreement = Agreement(LAYOUT)
    for client in range(3):
        agreement.add(update(client, step, [10, 10]))
    agreement.add(update(3, -length * step, [claim, claim]))
    cosines = agreement.cosines()
    assert cosines[3] == pytest.approx(-1.0) and all(cosines[client] == pytest.approx(1.0) for client in range(3))


def test_a_sample_of_columns_is_close_to_the_whole():
    layout = AdapterLayout(("a", "b"), (600, 600), (600, 600), rank=8, experts=2)
    generator = torch.Generator().manual_seed(2)
    common = torch.randn(layout.size, generator=generator)
    updates = [common + 2 * torch.randn(layout.size, generator=generator) for _ in range(3)]
    agreement = Agreement(layout)
    for i, delta in enumerate(updates):
        agreement.add(update(i, delta, [1, 1]))
    rest = updates[1] + updates[2]
    exact = torch.nn.functional.cosine_similarity(updates[0], rest, dim=0).item()
    assert len(agreement.columns) < layout.size / 4
    assert agreement.cosines()[0] == pytest.approx(exact, abs=0.06)
