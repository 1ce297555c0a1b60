"""Audit figures against small examples worked out by hand."""

import numpy as np
import pytest
import torch

from fedweave.evaluation.audit import alignment_audit, decided, per_task, purity, routing_table


def test_purity_counts_dominant_labels():
    assert purity([0, 0, 0, 1, 1], ["a", "a", "b", "b", "b"]) == 0.8


def test_audit_separates_local_from_global():
    """Two clients with perfect buckets; the second's are aligned to swapped experts, so only global suffers."""
    buckets = [[np.array([0, 1]), np.array([2, 3])]] * 2
    labels = [["a", "a", "b", "b"]] * 2
    good = alignment_audit(buckets, [[0, 1], [0, 1]], labels)
    bad = alignment_audit(buckets, [[0, 1], [1, 0]], labels)
    assert good["local"] == bad["local"] == {"purity": 1.0, "nmi": 1.0, "ari": 1.0}
    assert good["global"]["purity"] == 1.0 and bad["global"]["purity"] == 0.5
    assert bad["global"]["nmi"] == pytest.approx(0.0, abs=1e-9)


def test_local_audit_weights_clients_by_size():
    buckets = [[np.arange(3)], [np.array([0])]]
    audit = alignment_audit(buckets, [[0], [0]], [["a", "a", "b"], ["a"]])
    assert audit["local"]["purity"] == pytest.approx((3 * (2 / 3) + 1) / 4)


def test_rows_that_wait_for_a_bucket_are_in_none():
    audit = alignment_audit([[np.array([0, 2])], []], [[0], []], [["a", "b", "a", "b", "b"], ["a"]])
    assert audit["local"]["purity"] == audit["global"]["purity"] == 1.0


def test_routing_is_decided_where_one_expert_has_nearly_all_prompts_of_a_kind():
    weights = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.4, 0.6], [0.1, 0.9], [0.2, 0.8]])
    assert decided(weights, ["x", "x", "x", "y", "y"]) == pytest.approx({"x": 2 / 3, "y": 1.0})
    weights[1] = 0.0  # strange to the router: the shared part answers alone
    assert decided(weights, ["x", "x", "y", "z", "z"]) == pytest.approx({"x": 1 / 2, "y": 1.0, "z": 1.0})


def test_routing_rows_sum_to_one_and_macro_is_unweighted():
    weights = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]])
    table = routing_table(weights, ["x", "x", "y"])
    assert table["x"] == pytest.approx([0.8, 0.2]) and table["y"] == pytest.approx([0.2, 0.8])
    means = per_task(torch.tensor([1.0, 3.0, 5.0]), ["x", "x", "y"])
    assert means == {"x": 2.0, "y": 5.0, "macro": 3.5}
