"""Both versions of every kernel: plain torch, and Triton where it runs."""

import pkgutil
from importlib import import_module

import pytest
import torch

import fedweave.kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["plain", "triton"])
def version(request, monkeypatch):
    if request.param == "triton" and not fedweave.kernels.fused(torch.zeros(1, device=DEVICE)):
        pytest.skip("needs a CUDA device (or TRITON_INTERPRET=1 and triton)")
    if request.param == "plain":
        for found in pkgutil.iter_modules(fedweave.kernels.__path__, "fedweave.kernels."):
            if hasattr(module := import_module(found.name), "fused"):
                monkeypatch.setattr(module, "fused", lambda x: False)
    return request.param
