"""A running batch: prompts join between two steps and leave when their answer ends, each with its own experts.

Everyone who wants answers one by one uses it: the Python API, streaming, and the server, where requests arrive at
any time. A step is one token for every row; rows that have ended make room at once, because the last row moves
into the gap.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from fedweave.backbone.load import Backbone
from fedweave.backbone.packing import pack
from fedweave.backbone.prompts import EncodedPrompt
from fedweave.evaluation.losses import serving_weights
from fedweave.experts.mixture import Mixture
from fedweave.inference.cache import RowCache
from fedweave.inference.json_text import JsonTokens
from fedweave.inference.record import RecordedStep
from fedweave.inference.sampling import Sampling, TokenChooser
from fedweave.inference.text import AnswerText
from fedweave.kernels.rows import few_experts

_SCORED = 256  # tokens of a prompt whose logits are held at a time


@dataclass(frozen=True)
class TokenScore:
    """A token and how likely the model found it, before any option shaped the choice."""

    token: int
    logprob: float | None  # None: the first of a prompt
    top: dict[int, float]  # the likeliest tokens


def score_tokens(tokens: list[int], logits: torch.Tensor, top: int) -> list[TokenScore]:
    """Tokens [n] by the logits [n, V] that they were predicted with."""
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(top, logprobs.shape[-1]), -1)
    chosen = logprobs[torch.arange(len(tokens)), tokens].tolist()
    likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenScore(token, logprob, dict(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, chosen, likeliest, strict=True)
    ]


class Row:
    """One answer under way."""

    def __init__(
        self,
        backbone: Backbone,
        prompt: EncodedPrompt,
        gates: torch.Tensor,  # [M], or [M + R/r] where they speak of what experts share
        sampling: Sampling,
        number: int = 0,
        trim: bool = True,
    ):
        self.prompt, self.gates, self.sampling = prompt, gates, sampling
        self.new: list[int] = []  # tokens of the answer so far
        self.ended = ""  # why: stop, length, or dropped by its owner
        self.text = AnswerText(backbone.tokenizer, sampling.stop_strings, trim)
        self.scores: list[TokenScore] = []  # of the prompt's tokens with echo, then of the answer's, if asked for
        self.ends = [*backbone.end_ids, *sampling.stop_token_ids]
        ids = torch.from_numpy(prompt.ids).long().to(backbone.device)
        grammar = JsonTokens(backbone.tokenizer, self.ends) if sampling.json_object else None
        self.chooser = TokenChooser(sampling, ids, self.ends, number, grammar)

    @property
    def length(self) -> int:
        """Columns of the cache that this row will have used after its next step."""
        return len(self.prompt.ids) + len(self.new)

    @property
    def room(self) -> int:
        """Columns that it may need in all."""
        return len(self.prompt.ids) + self.sampling.max_new_tokens

    def take(self, token: int, logits: torch.Tensor) -> str:
        """Note a token, chosen by ``logits`` [V]; returns the text that it makes certain."""
        if token in self.ends:
            self.ended = "stop"
            return self.text.close()
        self.new.append(token)
        if self.sampling.logprobs is not None:
            self.scores += score_tokens([token], logits[None], self.sampling.logprobs)
        piece = self.text.add(token)
        if self.text.stopped:
            self.ended = "stop"
        elif len(self.new) == self.sampling.max_new_tokens:
            self.ended = "length"
            piece += self.text.close()
        return piece


class RunningBatch:
    """Up to ``rows`` answers at a time, each of about ``length`` tokens with its prompt: room for more is made when
    a longer one joins, and given back once nobody is there."""

    def __init__(
        self, backbone: Backbone, mixture: Mixture | None, theta: torch.Tensor | None, rows: int, length: int
    ):
        self.backbone, self.mixture, self.capacity = backbone, mixture, rows
        self.weights = (
            serving_weights(mixture.layout, theta, backbone.dtype) if mixture and theta is not None else []
        )
        self.rows: list[Row] = []
        self.length, self.cache = length, RowCache(rows, length)
        self._recorded: dict[tuple[int, bool], RecordedStep] | None = {} if backbone.device.type == "cuda" else None
        self.prefill = 16_384 if backbone.device.type == "cuda" else 1_024  # prompt tokens read between two steps

    @torch.no_grad()
    def advance(self, waiting: deque[Row]) -> Iterator[tuple[Row, str]]:
        """Let rows leave and join, then one token for everyone; yields (row, new text) for each that got one."""
        self._leave()
        joining = self._choose(waiting)
        self._make_room(joining)
        if joining:
            yield from self._take(joining, self._read(joining))
        if self.rows:
            yield from self._take(self.rows, self._step())

    def _leave(self) -> None:
        """Ended rows go; the last row takes the place of each."""
        for i in reversed(range(len(self.rows))):
            if self.rows[i].ended:
                last = self.rows.pop()
                if i < len(self.rows):
                    self.rows[i] = last
                    self.cache.move(len(self.rows), i, last.length)

    def _choose(self, waiting: deque[Row]) -> list[Row]:
        """First come, first served, as long as rows and the token budget last; at least one."""
        joining: list[Row] = []
        tokens = 0
        while waiting and len(self.rows) + len(joining) < self.capacity:
            tokens += len(waiting[0].prompt.ids)
            if joining and tokens > self.prefill:
                break
            joining.append(waiting.popleft())
        return joining

    def _make_room(self, joining: list[Row]) -> None:
        needed = max((row.room for row in joining), default=0)
        if needed > self.cache.length:
            self.cache.grow(needed, [row.length for row in self.rows])
        elif not self.rows and needed <= self.length < self.cache.length:
            self.cache = RowCache(self.capacity, self.length)
        else:
            return
        if self._recorded is not None:  # recordings know the old memory
            self._recorded = {}

    def _read(self, joining: list[Row]) -> torch.Tensor:
        """Read prompts into free rows; logits of their first tokens, [joining, V]."""
        device, first = self.backbone.device, len(self.rows)
        packed = pack([[row.prompt.ids for row in joining]], device)
        slots = torch.arange(first, first + len(joining), device=device)
        self.rows += joining
        cache = self.cache.read(packed, slots)
        gates = self._gates(joining).to(device).index_select(0, packed.sequence)[None]  # [1, T, M]
        with self._experts(gates, packed.ends):
            hidden = self.backbone.hidden(packed, cache)
        for row, start in zip(joining, packed.starts.tolist(), strict=True):
            if row.sampling.echo:
                row.scores = self._echoed(row, hidden[start : start + len(row.prompt.ids) - 1])
        return self.backbone.logits(hidden.index_select(0, packed.boundaries[1:].long() - 1))

    def _echoed(self, row: Row, hidden: torch.Tensor) -> list[TokenScore]:
        """A prompt's tokens by the hidden states [p - 1, d] before them: a long one's logits fill a memory."""
        first, *rest = row.prompt.ids.tolist()
        scores = [TokenScore(first, None, {})]
        for start in range(0, len(rest), _SCORED):
            end = start + _SCORED
            logits = self.backbone.logits(hidden[start:end])
            scores += score_tokens(rest[start:end], logits, row.sampling.logprobs or 0)
        return scores

    def _step(self) -> torch.Tensor:
        """Logits of every row's next token, [rows, V]."""
        newest = torch.tensor([row.new[-1] if row.new else 0 for row in self.rows])
        positions = torch.tensor([row.length - 1 for row in self.rows])
        gates = self._gates(self.rows)
        if self._recorded is None:
            device = self.backbone.device
            columns = max(row.length for row in self.rows)
            return self._extend(newest.to(device), positions.to(device), gates.to(device), columns)
        # on CUDA one recording serves all counts up to the next power of two
        size, few = min(self.capacity, 1 << (len(self.rows) - 1).bit_length()), few_experts(gates)
        if (size, few) not in self._recorded:
            run = partial(self._extend, few=few)
            self._recorded[size, few] = RecordedStep(size, gates.shape[1], self.backbone.device, run)
        return self._recorded[size, few](newest, positions, gates)

    def _extend(
        self,
        newest: torch.Tensor,
        positions: torch.Tensor,
        gates: torch.Tensor,
        columns: int | None = None,
        few: bool = False,
    ) -> torch.Tensor:
        """One more token for the first rows: all tensors in, logits out."""
        cache = self.cache.extend(positions, columns)
        with self._experts(gates[:, None], few=few):
            hidden = self.backbone.next_hidden(newest, positions, cache)
        return self.backbone.logits(hidden)

    def _gates(self, rows: list[Row]) -> torch.Tensor:
        """[rows, M + R/r] on the host."""
        every = self.mixture.layout.all_gates if self.mixture else lambda gates: gates
        return torch.stack([every(row.gates) for row in rows])

    def _experts(
        self, gates: torch.Tensor, spoken: torch.Tensor | None = None, few: bool = False
    ) -> AbstractContextManager[None]:
        """A pass with every row's own gates, broadcastable to its tokens; without a mixture the bare backbone."""
        return (
            nullcontext()
            if self.mixture is None
            else self.mixture.active(self.weights, gates, None, None, spoken, few)
        )

    def _take(self, rows: list[Row], logits: torch.Tensor) -> Iterator[tuple[Row, str]]:
        """Choose every row's token: all at once where nothing but the maximum is asked for."""
        best = logits.argmax(-1).tolist()
        for row, token, scores in zip(list(rows), best, logits, strict=True):
            if not row.ended:
                token = token if row.chooser.plain else row.chooser.choose(scores, row.new)
                yield row, row.take(token, scores)
