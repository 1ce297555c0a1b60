"""Signatures: what travels, and how far a sketch is from the truth."""

import math

import numpy as np
import pytest
import torch

from fedweave.alignment.align import signature_distance
from fedweave.discovery.signatures import Signatures
from fedweave.experts.layout import AdapterLayout
from tests.federations import changed, make_engine, run

BLOCKS = 12
LAYOUT = AdapterLayout(tuple(f"l{i}" for i in range(BLOCKS)), (4,) * BLOCKS, (150, 50) * (BLOCKS // 2), 8, 1)


def adapters(count: int, noise: float) -> list[torch.Tensor]:
    """Warmup adapters around three directions, so that cosines range from near 0 to near 1."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(3, LAYOUT.size, generator=generator)
    return [1e-4 * (centres[i % 3] + noise * torch.randn(LAYOUT.size, generator=generator)) for i in range(count)]


def distances(signer: Signatures, given: list[torch.Tensor]) -> np.ndarray:
    return signature_distance(signer.blocks([signer.of(adapter) for adapter in given]))


@pytest.mark.parametrize("k", [16, 64])
@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_the_error_of_a_sketch_is_the_documented_one(k, noise):
    """Over all pairs the root mean square within (1 - ρ²)/√(kL), and the worst of 1,770 within five of them."""
    given = adapters(60, noise)
    pairs = np.triu_indices(60, 1)
    exact = distances(Signatures(LAYOUT, 0, 1), given)[pairs]
    error = distances(Signatures(LAYOUT, k, 1), given)[pairs] - exact
    deviation = (1 - (1 - exact) ** 2) / math.sqrt(k * BLOCKS)
    assert np.sqrt(((error / deviation) ** 2).mean()) <= 1.25
    assert (np.abs(error) <= 5 * deviation + 0.2 / k).all()


def test_the_bias_of_a_sketch_is_the_documented_one():
    """One pair under a hundred projections."""
    given, k = adapters(4, 0.8)[::3], 16
    exact = distances(Signatures(LAYOUT, 0, 1), given)[0, 1]
    errors = [distances(Signatures(LAYOUT, k, seed), given)[0, 1] - exact for seed in range(100)]
    assert 0.3 < exact < 0.7
    assert abs(np.mean(errors)) <= 0.2 / k + 3 * np.std(errors) / math.sqrt(len(errors))
    assert np.std(errors) == pytest.approx((1 - (1 - exact) ** 2) / math.sqrt(k * BLOCKS), rel=0.25)


def test_what_a_bucket_sends():
    whole, sketched = Signatures(LAYOUT, 0, 1), Signatures(LAYOUT, 64, 1)
    adapter = adapters(1, 0.3)[0]
    assert whole.of(adapter).shape == (LAYOUT.signature_size,) and whole.of(adapter).dtype == torch.float32
    assert sketched.of(adapter).shape == (BLOCKS * 64,) and sketched.of(adapter).dtype == torch.float16
    assert torch.equal(sketched.of(adapter), Signatures(LAYOUT, 64, 1).of(adapter)), "the same at every site"
    assert not torch.equal(sketched.of(adapter), Signatures(LAYOUT, 64, 2).of(adapter))
    assert Signatures(LAYOUT, 10_000, 1).widths == whole.widths, "no block grows"


def test_a_zero_block_and_a_tiny_one_survive():
    """Zero stays zero; half precision does not lose an adapter that barely moved."""
    signer = Signatures(LAYOUT, 32, 1)
    given = [1e-9 * a for a in adapters(6, 0.3)]
    for adapter in given[:2]:
        LAYOUT.views(adapter)[0]["B"].zero_()
    sketched, exact = distances(signer, given), distances(Signatures(LAYOUT, 0, 1), given)
    assert np.isfinite(sketched).all() and np.abs(sketched - exact).max() < 0.2
    assert (sketched[0, 2:] > 1 / BLOCKS - 1e-6).all()


def test_a_federation_can_use_sketches(config, backbone):
    """The same buckets and adapters, so distances within the documented error."""
    plain, _ = run(config, make_engine(config, backbone))
    sketching = changed(config, discovery={"sketch": 32})
    sketched, final = run(sketching, make_engine(sketching, backbone))
    exact, near = (np.array(state.report["signature_distance"]) for state in (plain, sketched))
    blocks = len(plain.layout.names)
    bound = 5 * (1 - (1 - exact) ** 2) / math.sqrt(32 * blocks) + 0.2 / 32
    assert (np.abs(near - exact) <= bound + 1e-3).all() and (near != exact).any()
    assert torch.isfinite(final.theta).all()


@pytest.mark.parametrize("k", [0, 8])
def test_several_adapters_are_signed_at_once(k):
    adapters, signer = torch.randn(5, LAYOUT.size), Signatures(LAYOUT, k, 1)
    one_by_one = torch.stack([signer.of(adapter) for adapter in adapters])
    torch.testing.assert_close(signer.of(adapters), one_by_one, atol=1e-3, rtol=1e-3)
