"""Greedy generation with routed experts: prompts that need different experts share one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import EncodedPrompt
from fedweave.console import Progress
from fedweave.evaluation.losses import serving_weights
from fedweave.experts.mixture import Mixture


@torch.no_grad()
def generate(
    backbone: Backbone,
    prompts: Sequence[EncodedPrompt],
    max_new_tokens: int,
    mixture: Mixture | None = None,
    theta: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,  # [n, M]
    batch_size: int = 64,
    progress: Progress | None = None,
) -> list[str]:
    """Answers in the order of ``prompts``; batches are formed by length, padding stands on the left."""
    answers = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids))
    weights = serving_weights(mixture.layout, theta, backbone.dtype) if mixture and theta is not None else None
    with backbone.decoding() as model:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            ids, mask = _left_pad([prompts[i] for i in batch], backbone)
            options = {
                "input_ids": ids,
                "attention_mask": mask,
                "max_new_tokens": max_new_tokens,
                "do_sample": False,
                "num_beams": 1,
                "temperature": None,
                "top_p": None,
                "top_k": None,
                "eos_token_id": _end_ids(backbone),
                "pad_token_id": backbone.tokenizer.pad_token_id,
            }
            if mixture is None or weights is None:
                out = model.generate(**options)
            else:
                row_gates = None if gates is None else gates[batch].to(backbone.device)[:, None]  # [b, 1, M]
                with mixture.active(weights, row_gates):
                    out = model.generate(**options)
            texts = backbone.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
            for i, text in zip(batch, texts, strict=True):
                answers[i] = text.strip()
            if progress:
                progress.advance(len(batch))
    return answers


def _end_ids(backbone: Backbone) -> list[int]:
    """The end of an answer as trained, and the tokenizer's own end of text."""
    ends = [backbone.prompts.end_id, backbone.tokenizer.eos_token_id]
    return list(dict.fromkeys(i for i in ends if i is not None))


def _left_pad(prompts: Sequence[EncodedPrompt], backbone: Backbone) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(p.ids) for p in prompts)
    ids = torch.full((len(prompts), longest), backbone.tokenizer.pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt.ids) :] = torch.from_numpy(prompt.ids).long()
        mask[row, longest - len(prompt.ids) :] = 1
    return ids.to(backbone.device), mask.to(backbone.device)
