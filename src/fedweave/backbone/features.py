"""Prompt features f(x): the mean of the frozen backbone's last hidden states over the prompt's words
(of a conversation: over those of its last turn).

One feature serves discovery and the router, and the backbone never changes, so it is computed once per
prompt and kept on disk under a key of everything that decides its value.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedweave.backbone.gguf import CACHE
from fedweave.backbone.load import Backbone
from fedweave.backbone.packing import pack, token_budget_batches
from fedweave.backbone.prompts import EncodedPrompt
from fedweave.console import Console
from fedweave.files import atomic_file
from fedweave.kernels.lanes import sum_segments


@torch.no_grad()
def compute_features(
    backbone: Backbone, prompts: Sequence[EncodedPrompt], console: Console | None = None
) -> torch.Tensor:
    """Features of ``prompts``, float32 on the CPU, [n, d]; adapters must be off."""
    prompts = [prompt.routed for prompt in prompts]
    features = torch.empty(len(prompts), backbone.width)
    lengths = [len(p.ids) for p in prompts]
    # a narrow model's kernels are over before the next is launched: larger batches, for the same memory
    budget = min(65_536, max(16_384, 2**25 // backbone.width)) if backbone.device.type == "cuda" else 2_048
    progress = (console or Console(quiet=True)).progress("features", len(prompts), "prompts")
    for batch in token_budget_batches(lengths, budget):
        packed = pack([[prompts[i].ids for i in batch]], backbone.device)
        hidden = backbone.hidden(packed).float()  # [T, d]
        spans = torch.tensor([prompts[i].pool for i in batch], device=backbone.device)  # [S, 2]
        starts, ends = (spans + packed.starts.long()[:, None]).unbind(1)
        token = torch.arange(packed.tokens, device=backbone.device)
        inside = (token >= starts[packed.sequence]) & (token < ends[packed.sequence])  # [T]
        sums = sum_segments(hidden * inside[:, None], packed.boundaries)  # [S, d]
        features[batch] = (sums / (ends - starts)[:, None]).cpu()
        progress.advance(len(batch))
    progress.close()
    return features


def cached_features(
    backbone: Backbone, prompts: Sequence[EncodedPrompt], console: Console | None = None
) -> torch.Tensor:
    """Like :func:`compute_features`, through the disk cache."""
    path = CACHE / "features" / f"{_key(backbone, prompts)}.safetensors"
    if path.is_file():
        try:
            return load_file(path)["features"]
        except SafetensorError:
            path.unlink(missing_ok=True)  # a damaged cache is no loss
    features = compute_features(backbone, prompts, console)
    with suppress(OSError, SafetensorError):  # a full or read-only disk must not stop the run
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, shared=True) as partial:
            save_file({"features": features}, partial)
    return features


def _key(backbone: Backbone, prompts: Sequence[EncodedPrompt]) -> str:
    # a quantised weight in float32 is no bfloat16 number, as those of the same model's plain copy are
    rounding = [str(backbone.dtype), *(["as stored"] if backbone.quantised else [])]
    # positions, windows and soft-caps are no weights, which are all that a fingerprint knows
    shape = backbone.model.config.to_json_string()
    digest = hashlib.sha256(json.dumps([backbone.fingerprint, backbone.device.type, *rounding, shape]).encode())
    for prompt in prompts:
        digest.update(prompt.routed.ids.tobytes() + repr(prompt.routed.pool).encode())
    return digest.hexdigest()[:40]
