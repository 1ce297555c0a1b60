"""What only a CUDA device runs: flash attention, grouped products, recorded training and decoding steps."""

from collections import deque
from dataclasses import replace

import pytest
import torch

from fedweave.backbone import packing
from fedweave.backbone.load import load_backbone
from fedweave.config import BackboneConfig
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.inference import generate as generate_module
from fedweave.inference.rows import Row, RunningBatch
from fedweave.inference.sampling import Sampling
from fedweave.router.mlp import RouterLayout
from fedweave.training import batch
from tests.helpers import TARGETS, client_data, make_lanes, make_trainer, random_theta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2", "gemma3"])
def on_gpu(request, model_folder):
    return load_backbone(BackboneConfig(model=str(model_folder(request.param)), device="cuda", max_length=128))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def test_both_attention_kernels_equal_the_padded_reference(on_gpu, monkeypatch):
    rows = [e.ids for e in client_data(on_gpu, 12, seed=0).examples]
    packed = packing.pack([rows], on_gpu.device)
    assert packed.tiles is not None
    with torch.no_grad():
        short = on_gpu.hidden(packed)
        packed.tiles = None
        flash = on_gpu.hidden(packed)
        monkeypatch.setattr(packing, "varlen", lambda: None)
        reference = on_gpu.hidden(packed)
    assert relative(short, reference) < 2e-2 and relative(flash, reference) < 2e-2  # bfloat16


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recorded_steps_equal_eager_ones_over_changing_batches(on_gpu, dropout, smooth_optimiser):
    """A recorded step has other shapes, so products add up in another order: a sum that lies between two bfloat16
    numbers (0.4 % apart) may be rounded to the other one. Few are, so that losses, which average over tokens, and
    steps, which average over a matrix, differ by less than one such rounding and a few."""
    layout = AdapterLayout.of(on_gpu.linear_layers(TARGETS), 8, 3)
    router = RouterLayout(on_gpu.width, 16, 3)
    lanes = make_lanes(on_gpu, layout, router, clients=3, steps=5)
    results = []
    for graphs in (True, False):
        trainer, mixture = make_trainer(on_gpu, layout, router, dropout, cuda_graphs=graphs)
        list(trainer.train(lanes[::-1], 3))  # a first use must leave nothing behind
        results.append(list(trainer.train(lanes, 3)))
        mixture.detach()
    for replayed, eager in zip(*results, strict=True):
        assert replayed.losses == pytest.approx(eager.losses, rel=4e-3)
        assert relative(replayed.delta_theta, eager.delta_theta) < 2e-2
        assert relative(replayed.delta_phi, eager.delta_phi) < 2e-2
        assert replayed.tokens == eager.tokens


@pytest.mark.parametrize("slows", [{"schedule": "late"}, {"patience": 1}], ids=["schedule", "patience"])
def test_recorded_steps_follow_the_rate_of_their_round_with_given_gates_and_a_shared_part(
    slows, on_gpu, smooth_optimiser
):
    """The rate is read from memory: a recording made at one pace goes at another."""
    layout = AdapterLayout.of(on_gpu.linear_layers(TARGETS), 8, 3, shared=16)
    lanes = [
        replace(lane, phi=None, gates=torch.eye(3)[torch.arange(len(lane.data)) % 3])
        for lane in make_lanes(on_gpu, layout, None, clients=3, steps=4)
    ]
    results = []
    for graphs in (True, False):
        trainer, mixture = make_trainer(on_gpu, layout, None, 0.0, cuda_graphs=graphs, **slows)
        list(trainer.train(lanes, 3))
        trainer.pace = 0.25
        results.append(list(trainer.train(lanes, 3)))
        mixture.detach()
    for replayed, eager in zip(*results, strict=True):
        assert replayed.losses == pytest.approx(eager.losses, rel=4e-3)
        assert relative(replayed.delta_theta, eager.delta_theta) < 2e-2


def test_steps_of_several_recorded_sizes_equal_eager_ones(on_gpu, monkeypatch, smooth_optimiser):
    """Small steps use small recordings; a later round that needs more room is recorded anew."""
    monkeypatch.setattr(batch, "GRAIN", 16)
    layout = AdapterLayout.of(on_gpu.linear_layers(TARGETS), 8, 3)
    router = RouterLayout(on_gpu.width, 16, 3)
    lanes = make_lanes(on_gpu, layout, router, clients=3, steps=6)
    for lane in lanes:  # steps of one, two, … examples, and the largest only in the second round
        lane.schedule = [indices[: 1 + step % len(indices)] for step, indices in enumerate(lane.schedule)]
    small = [replace(lane, schedule=lane.schedule[:2]) for lane in lanes]
    results = []
    for graphs in (True, False):
        trainer, mixture = make_trainer(on_gpu, layout, router, 0.0, cuda_graphs=graphs)
        results.append([*trainer.train(small, 3), *trainer.train(lanes, 3), *trainer.train(small, 3)])
        if graphs:
            (group,) = trainer._groups.values()
            sizes = {capacity.tokens for capacity in group.graphs._recordings}
            assert len(sizes) == 3 and len(group.graphs._seen) == 8
        mixture.detach()
    for replayed, eager in zip(*results, strict=True):
        assert replayed.losses == pytest.approx(eager.losses, rel=4e-3)
        assert relative(replayed.delta_theta, eager.delta_theta) < 2e-2


@pytest.mark.parametrize("graphs", [True, False])
def test_training_repeats_to_the_last_bit(on_gpu, graphs):
    layout = AdapterLayout.of(on_gpu.linear_layers(TARGETS), 8, 3)
    router = RouterLayout(on_gpu.width, 16, 3)
    lanes = make_lanes(on_gpu, layout, router, clients=3, steps=4)
    results = []
    for _ in range(2):
        trainer, mixture = make_trainer(on_gpu, layout, router, 0.1, cuda_graphs=graphs)
        results.append(list(trainer.train(lanes, 3)))
        mixture.detach()
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.delta_theta, two.delta_theta) and torch.equal(one.delta_phi, two.delta_phi)
        assert one.losses == two.losses


def test_recorded_decoding_equals_eager_decoding(on_gpu, monkeypatch):
    layout = AdapterLayout.of(on_gpu.linear_layers(TARGETS), 8, 3)
    mixture = Mixture(on_gpu.linear_layers(TARGETS), layout, 16)
    theta = random_theta(layout, 5, 0.4).cuda()
    prompts = [e.prompt for e in client_data(on_gpu, 10, seed=2).examples]
    gates = torch.rand(10, 3).softmax(-1)
    replayed = generate_module.generate(on_gpu, prompts, 30, mixture, theta, gates)
    monkeypatch.setattr(generate_module, "captured", lambda step, state: step)
    eager = generate_module.generate(on_gpu, prompts, 30, mixture, theta, gates)
    mixture.detach()
    assert replayed == eager


def test_a_decoding_step_repeats_to_the_last_bit():
    query = torch.randn(400, 9, 1, 64, device="cuda").bfloat16()
    key, value = torch.randn(2, 400, 3, 600, 64, device="cuda").bfloat16()
    last = torch.randint(600, (400,), device="cuda")
    one, *others = (packing.packed_attention(None, query, key, value, None, last=last)[0] for _ in range(8))
    assert all(torch.equal(one, other) for other in others)


def test_a_finished_trainer_gives_its_memory_back(on_gpu):
    layout = AdapterLayout.of(on_gpu.linear_layers(TARGETS), 8, 3)
    router = RouterLayout(on_gpu.width, 16, 3)
    lanes = make_lanes(on_gpu, layout, router, clients=3)
    used = []
    for _ in range(3):
        trainer, mixture = make_trainer(on_gpu, layout, router)
        list(trainer.train(lanes, 3))
        trainer.release()
        mixture.detach()
        used.append(torch.cuda.memory_reserved())
    assert used[2] <= used[0] + (1 << 22)


def test_a_recorded_running_batch_equals_an_eager_one(on_gpu):
    """Rows join and leave; a recording made for other rows serves those that come later."""
    layout = AdapterLayout.of(on_gpu.linear_layers(TARGETS), 4, 3)
    mixture = Mixture(on_gpu.linear_layers(TARGETS), layout, 16)
    theta = random_theta(layout, 5, 0.4).to(on_gpu.device)
    prompts = on_gpu.prompts.encode_prompts([f"How many coins has Ben if he finds {i} more?" for i in range(9)])
    gates = torch.eye(3)[torch.arange(9) % 3]
    texts = []
    for recorded in (True, False):
        rows = [
            Row(on_gpu, prompt, gate, Sampling(max_new_tokens=6 + 3 * (i % 4)))
            for i, (prompt, gate) in enumerate(zip(prompts, gates, strict=True))
        ]
        batch, waiting = RunningBatch(on_gpu, mixture, theta, 4, 128), deque(rows)
        if not recorded:
            batch._recorded = None
        while waiting or not all(row.ended for row in batch.rows):
            list(batch.advance(waiting))
        texts.append([row.text.text for row in rows])
    mixture.detach()
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= 8  # bfloat16: attention over more columns may turn one tie
