"""The count of what a step keeps, beside the storages that are really alive when its forward pass is over."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workload import Shape, backbone_of, make_clients, make_training, random_model, schedules
from fedweave.backbone import packing
from fedweave.kernels import Context
from fedweave.training.batch import build_batch
from fedweave.training.fit import step_memory
from fedweave.training.lockstep import LaneGroup

SHAPE = Shape(width=64, layers=6, heads=4, kv_heads=2, head_width=16, inner=192, vocabulary=256)
ALL = ("all-linear",)


class Alive(TorchDispatchMode):
    """Bytes of all tensors made in here that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:  # a view of what was there before is nothing new
                    self._seen[storage.data_ptr()] = weakref.ref(storage)
        return out

    @property
    def bytes(self) -> int:
        alive = (ref() for ref in self._seen.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


class KeepsWhatTheKernelKeeps(torch.autograd.Function):
    """On a CPU attention is padded; this keeps what kernels/attention.py does, and computes no attention."""

    @staticmethod
    def forward(ctx: Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.clone()
        ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[:2]))
        return out

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ALL])
@pytest.mark.parametrize("fused", [True, False])
def test_what_a_layer_keeps(fused, targets, monkeypatch):
    """Two depths, so that what does not belong to a layer cancels."""
    found, counted = {}, {}
    for layers in (SHAPE.layers, 2):
        shape = Shape(**{**vars(SHAPE), "layers": layers})
        backbone = backbone_of(random_model(shape, torch.device("cpu"), torch.float32), fused)
        clients = make_clients(shape, 2, 8)
        monkeypatch.setattr(packing, "attend", lambda q, k, v, *rest: KeepsWhatTheKernelKeeps.apply(q, k, v))
        trainer, lanes = make_training(backbone, clients, schedules(clients, 1, 8), False, targets)
        memory = step_memory(backbone, trainer.mixture.layout)
        group = LaneGroup(trainer, len(lanes), masked=False)
        group.load(lanes)
        batch = build_batch(lanes, 0, 0.1, backbone.device)
        for again in (False, True):
            trainer.checkpointing = again
            with Alive() as alive:
                losses = trainer.lane_losses(batch, group.experts, group.routers, len(lanes))
                kept = alive.bytes
            found[layers, again] = kept / batch.packed.tokens
            counted[layers, again] = memory.token_bytes(again)
            del losses
        trainer.mixture.detach()
        monkeypatch.undo()
    more = SHAPE.layers - 2
    for again in (False, True):
        real = (found[SHAPE.layers, again] - found[2, again]) / more
        count = (counted[SHAPE.layers, again] - counted[2, again]) / more
        assert real == pytest.approx(count, rel=0.01), "with layers that run again" if again else "with all kept"
    assert found[SHAPE.layers, True] < found[SHAPE.layers, False] / 3
