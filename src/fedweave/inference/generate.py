"""Greedy answers to a fixed set of prompts, as testing needs them: prompts that need different experts decode in
one batch.

Prompts are read in one packed, padding-free pass that fills the key-value cache; each further step is one token
per row. On CUDA the step is captured once as a graph and replayed, since at this size launching kernels costs
more than running them. Answers that are sampled, streamed or asked for one by one: :mod:`fedweave.inference.rows`.
"""

from collections.abc import Callable, Sequence

import torch

from fedweave.backbone.load import Backbone
from fedweave.backbone.packing import Packed, pack
from fedweave.backbone.prompts import EncodedPrompt
from fedweave.console import ProgressBar
from fedweave.evaluation.losses import serving_weights
from fedweave.experts.mixture import Mixture
from fedweave.inference.cache import RowCache
from fedweave.inference.record import captured
from fedweave.kernels.frozen import times

_CHECK_EVERY = {"cpu": 1, "cuda": 16}  # steps between two looks at whether every row has ended; a look stalls a GPU


@torch.no_grad()
def generate(
    backbone: Backbone,
    prompts: Sequence[EncodedPrompt],
    max_new_tokens: int | Sequence[int],
    mixture: Mixture | None = None,
    theta: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,  # [n, M]
    batch_size: int | str = "auto",
    progress: ProgressBar | None = None,
) -> list[str]:
    """Answers in the order of ``prompts``, each of at most so many tokens as all may have or as it may have itself;
    batches are formed by that and by length."""
    answers = [""] * len(prompts)
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if batch_size == "auto":
        batch_size = 400 if backbone.device.type == "cuda" else 32
    batch_size = int(batch_size)
    order = sorted(range(len(prompts)), key=lambda i: (-limits[i], -len(prompts[i].ids)))
    weights = serving_weights(mixture.layout, theta, backbone.dtype) if mixture and theta is not None else None
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        rows, most = [prompts[i] for i in batch], [limits[i] for i in batch]
        if mixture is None or weights is None:
            tokens = _decode(backbone, rows, most, lambda shape, step: step())
        else:
            chosen = None if gates is None else gates[batch].to(backbone.device)  # [rows, M]

            def routed(
                packed: Packed | None,
                step: Callable[[], torch.Tensor],
                chosen: torch.Tensor | None = chosen,
            ) -> torch.Tensor:
                """Run a pass with every row's own gates, spread over packed tokens or one token per row."""
                spread = None
                if chosen is not None:
                    spread = chosen[:, None] if packed is None else chosen.index_select(0, packed.sequence)[None]
                with mixture.active(weights, spread, spoken=packed.ends if packed else None):
                    return step()

            tokens = _decode(backbone, rows, most, routed)
        for i, text in zip(batch, _texts(backbone, tokens), strict=True):
            answers[i] = text
        if progress:
            progress.advance(len(batch))
    return answers


Around = Callable[[Packed | None, Callable[[], torch.Tensor]], torch.Tensor]


def _decode(
    backbone: Backbone, prompts: Sequence[EncodedPrompt], limits: Sequence[int], around: Around
) -> torch.Tensor:
    """Greedy tokens of a batch, [rows, steps]; ``around`` switches the experts on for one pass."""
    device, count, steps = backbone.device, len(prompts), max(limits)
    most = torch.tensor(limits, device=device)  # [rows]
    packed = pack([[p.ids for p in prompts]], device)
    cache = RowCache(count, packed.longest + steps)
    hidden = around(packed, lambda: backbone.hidden(packed, cache.read(packed)))
    ends = packed.boundaries[1:].long()
    positions = ends - packed.starts.long()  # [rows] the column of the first new token
    cache.extend(positions)
    newest = times(hidden.index_select(0, ends - 1), backbone.head).argmax(-1)  # [rows]
    out = torch.full((count, steps), backbone.tokenizer.pad_token_id, device=device)
    stop = torch.tensor(backbone.end_ids, device=device)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    column = torch.zeros(1, dtype=torch.long, device=device)

    def advance() -> None:
        """Keep the newest token of rows that go on, then predict the next; all in place, so it can be replayed."""
        done.logical_or_(torch.isin(newest, stop) | (column >= most))
        kept = torch.where(done, out.new_full((), backbone.tokenizer.pad_token_id), newest)
        out.index_copy_(1, column, kept[:, None])
        states = around(None, lambda: backbone.next_hidden(newest, positions, cache))
        newest.copy_(times(states, backbone.head).argmax(-1))
        positions.add_(1)
        column.add_(1)

    replay = advance
    for step in range(steps - 1):
        if step == 1 and device.type == "cuda" and steps > 8:
            replay = captured(advance, [newest, positions, column, done])
        replay()
        if (step + 1) % _CHECK_EVERY[device.type] == 0 and bool(done.all()):
            return out
    done.logical_or_(torch.isin(newest, stop) | (column >= most))
    out.index_copy_(1, column, torch.where(done, backbone.tokenizer.pad_token_id, newest)[:, None])
    return out


def _texts(backbone: Backbone, tokens: torch.Tensor) -> list[str]:
    texts = backbone.tokenizer.batch_decode(tokens.cpu(), skip_special_tokens=True)
    return [text.strip() for text in texts]
