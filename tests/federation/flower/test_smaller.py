"""Compressed updates and sketched signatures through Flower's messages: the same model, and the bytes counted."""

import pytest
import torch

from fedweave.config import from_tree
from fedweave.settings import to_tree
from tests.federation.flower.conftest import Federation
from tests.federations import make_engine, run


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_smaller_messages_give_the_in_process_model(config, backbone, models, dtype):
    tree = to_tree(config)
    tree["training"] |= {"rounds": 3, "clients_per_step": 1}
    tree["federation"] |= {"update_dtype": dtype, "patience": 5.0, "deadline": 5.0}
    tree["discovery"]["sketch"] = 16
    config = from_tree(tree)
    start, expected = run(config, make_engine(config, backbone))
    federation = Federation(config, models)
    _, final, reports = federation.run()
    # A last bit that differs can tip a rounding over, so the models agree to a small part of their way.
    assert (final.theta - expected.theta).norm() <= 0.05 * (expected.theta - start.theta).norm()
    assert (final.phi - expected.phi).norm() <= 0.05 * (expected.phi - start.phi).norm()
    up = [answer for way, _, answer in federation.grid.sent if way == "up"]
    sent = sum(answer.size for answer in up if "losses" in answer.facts)
    assert sent == sum(sum(report.receipts.bytes_up.values()) for report in reports) > 0
    signatures = [answer.tensors["signatures"] for answer in up if "signatures" in answer.tensors]
    assert len(signatures) == 3 and all(s.dtype == torch.float16 and s.shape[1] == 4 * 16 for s in signatures)
    owed = [site.session.client.memory.after for site in federation.sites]
    assert all(any(part.any() for part in parts.values()) for parts in owed)
    assert torch.isfinite(final.theta).all()
