"""Both aggregation rules against an example worked out by hand."""

import pytest
import torch

from fedweave.aggregation.rules import ClientAverage, ExpertAverage
from fedweave.experts.layout import AdapterLayout


def test_experts_average_over_matched_samples_and_an_unserved_expert_stays():
    """One layer with in = out = 1 and rank 1, so an expert is two numbers. Three experts, two clients:
    n(0,·) = [30, 10, 0], n(1,·) = [10, 0, 0].

    Expert 0: (30·1 + 10·5) / 40 = 2. Expert 1: client 0 alone, 7. Expert 2: nobody, 0.
    """
    layout = AdapterLayout(("w",), (1,), (1,), rank=1, experts=3)
    average = ExpertAverage(layout, torch.device("cpu"))
    #                            A: e0   e1    e2   B: e0   e1    e2
    average.add(torch.tensor([1.0, 7.0, 100.0, 2.0, 8.0, 100.0]), torch.tensor([30.0, 10.0, 0.0]))
    average.add(torch.tensor([5.0, 50.0, 100.0, 6.0, 50.0, 100.0]), torch.tensor([10.0, 0.0, 0.0]))
    assert average.step().tolist() == pytest.approx([2.0, 7.0, 0.0, 3.0, 8.0, 0.0])


def test_what_experts_share_is_averaged_over_whole_clients():
    """One expert that only client 0 serves, and the shared part: (30·1 + 10·5) / 40 = 2."""
    layout = AdapterLayout(("w",), (1,), (1,), rank=1, experts=1, shared=1)
    average = ExpertAverage(layout, torch.device("cpu"))
    #                          A: e0   all  B: e0   all
    average.add(torch.tensor([7.0, 1.0, 8.0, 2.0]), torch.tensor([20.0]), 30)
    average.add(torch.tensor([50.0, 5.0, 50.0, 6.0]), torch.tensor([0.0]), 10)
    assert average.step().tolist() == pytest.approx([7.0, 2.0, 8.0, 3.0])


def test_a_part_that_is_not_uploaded_may_hold_anything():
    layout = AdapterLayout(("w",), (1,), (1,), rank=1, experts=2)
    average = ExpertAverage(layout, torch.device("cpu"))
    average.add(torch.tensor([1.0, float("nan"), 1.0, float("inf")]), torch.tensor([3.0, 0.0]))
    assert average.step().tolist() == [1.0, 0.0, 1.0, 0.0]


def test_the_router_averages_whole_clients_by_size():
    average = ClientAverage(2, torch.device("cpu"))
    average.add(torch.tensor([1.0, 0.0]), 30)
    average.add(torch.tensor([5.0, 4.0]), 10)
    assert average.step().tolist() == pytest.approx([2.0, 1.0])
