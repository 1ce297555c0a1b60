"""Which words did a client train on? The span check of DAGER (Petrov et al., 2024), on our own messages.

What enters the first layer is a function of the token alone: x_v, its normalised embedding. The gradient of factors
A there is a sum over the batch's tokens of something times x_t, so that its rows lie in the span of the x_t, and a
token whose x_v lies in that span was in the batch. A client does not send gradients but what AdamW made of them;
the check is the same, and its score is the share of x_v that lies in the span of the rows that came:

    update, start    rows of ΔA of the first layer's adapters
    signature        has B alone, which gradients fill with A₀ x_t: the score is how strongly B answers to A₀ x_v

Candidates are all tokens of everybody's rows but those in more than half of them, which anybody would guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from transformers import PreTrainedTokenizerFast

from benchmarks.server_memory import save_random
from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import Encoded
from fedweave.data.sample import make_sample
from fedweave.discovery.signatures import Signatures
from fedweave.experts.layout import AdapterLayout


def wide_model(folder: Path) -> Path:
    """Two layers of random weights, as wide as a small real model and with whole words as tokens: random embeddings
    are farther from each other than learned ones, so that spans tell more of them than they would."""
    rows = [row for pool in make_sample(2000, 0)[0].values() for row in pool]
    tokenizer = Tokenizer(WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = ["<unk>", "<pad>", "<eos>"]
    tokenizer.train_from_iterator(
        [f"{r.prompt} {r.response} Response" for r in rows], WordLevelTrainer(special_tokens=special)
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    return save_random(fast, folder, width=512, heads=8)


def first_inputs(backbone: Backbone) -> torch.Tensor:
    """[V, d] what enters the first layer's projections, for every token."""
    model = backbone.model.model
    with torch.no_grad():
        return model.layers[0].input_layernorm(model.embed_tokens.weight).float().cpu()


def candidates(everybody: Sequence[Encoded], own: Sequence[Encoded]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [n], whether each is in the client's rows [n])"""
    counts = Counter(token for example in everybody for token in set(example.ids))
    listed = np.array(sorted(token for token, rows in counts.items() if rows <= len(everybody) / 2))
    return listed, np.isin(listed, [token for example in own for token in example.ids])


def first_layer(layout: AdapterLayout) -> list[int]:
    """Adapters whose input is that of the first layer."""
    return [
        i for i, name in enumerate(layout.names) if ".0." in name and name.endswith(("q_proj", "k_proj", "v_proj"))
    ]


def in_the_span(inputs: torch.Tensor, layout: AdapterLayout, moved: torch.Tensor) -> torch.Tensor:
    """[n] share of every input [n, d] in the span of the rows of ΔA; ``moved`` [P]."""
    views = layout.views(moved.float().cpu())
    rows = torch.cat([views[i]["A"] for i in first_layer(layout)])  # [rows, d]
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    _, strengths, directions = torch.linalg.svd(rows, full_matrices=False)
    span = directions[strengths > 1e-3 * strengths[0]]
    return (inputs @ span.T).square().sum(1) / inputs.square().sum(1)


def answering(
    inputs: torch.Tensor, signer: Signatures, start: torch.Tensor, signature: torch.Tensor
) -> torch.Tensor:
    """[n] how strongly the B of a signature [D] answers to A₀ x, for its length; sketches are undone first."""
    layout, found = signer.layout, torch.zeros(len(inputs))
    blocks = signature.float().split(signer.widths)
    signs = signer._signs if signer.sketch else [None] * len(blocks)
    for i in first_layer(layout):
        block = blocks[i]
        if (sign := signs[i]) is not None:
            block = torch.linalg.pinv(sign.float()).T @ block
        b = block.view(layout.rank, layout.outputs[i])
        low = inputs @ layout.views(start.float().cpu())[i]["A"].T  # [n, r]
        found += (low @ b).norm(dim=1) / low.norm(dim=1).clamp(min=1e-30) / b.norm().clamp(min=1e-30)
    return found


def recovered(scores: torch.Tensor, members: np.ndarray) -> dict[str, float]:
    """How well scores tell a client's tokens from others: the area under the ROC curve, and of as many tokens as it
    has, those with the highest scores, the share that are its own."""
    best = np.argsort(-scores.nan_to_num(0.0).numpy(), kind="stable")[: members.sum()]
    return {"auc": float(roc_auc_score(members, scores.nan_to_num(0.0))), "found": float(members[best].mean())}
