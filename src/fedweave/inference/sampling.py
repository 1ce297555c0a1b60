"""How the next token is chosen. Options carry the names of transformers' GenerationConfig, and its own logits
processors do the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedweave.errors import UserError
from fedweave.settings import build, setting
from fedweave.streams import stream_key

if TYPE_CHECKING:
    from transformers.generation.logits_process import LogitsProcessorList

_ONLY_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")


@dataclass(frozen=True)
class Sampling:
    """One answer's options; the defaults are greedy decoding."""

    max_new_tokens: int = setting(64, "Longest answer in tokens.", low=1)
    min_new_tokens: int = setting(0, "No end before that many tokens.", low=0)
    do_sample: bool = setting(False, "Draw from the distribution instead of taking its maximum.")
    temperature: float = setting(1.0, "Flattens (above 1) or sharpens the distribution.", low=1e-3, high=100.0)
    top_k: int = setting(0, "Draw from that many likeliest tokens; 0 means all.", low=0)
    top_p: float = setting(
        1.0, "Draw from the likeliest tokens that hold that much probability.", low=1e-6, high=1.0
    )
    min_p: float = setting(0.0, "Leave out tokens below that share of the likeliest one.", low=0.0, high=1.0)
    typical_p: float = setting(1.0, "Draw from the locally typical tokens of that mass.", low=1e-6, high=1.0)
    repetition_penalty: float = setting(
        1.0, "Above 1: tokens already seen become unlikelier.", low=1e-3, high=100.0
    )
    no_repeat_ngram_size: int = setting(0, "No n-gram of that length occurs twice; 0 allows all.", low=0)
    stop_strings: tuple[str, ...] = setting((), "The answer ends before the first of these.")
    seed: int | None = setting(None, "The same seed draws the same answer, whatever else is in the batch.")

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Sampling:
        """Options by name; an unknown one, or one without effect, is one sentence."""
        given = {name: value for name, value in options.items() if value is not None and value not in ([], ())}
        sampling = build(cls, given, what="generation option")
        idle = [name for name in given if name in _ONLY_SAMPLED]
        if idle and not sampling.do_sample:
            raise UserError(f"{idle[0]} has no effect on greedy decoding; add do_sample=True.")
        if not all(sampling.stop_strings):
            raise UserError("stop_strings must not hold an empty text.")
        return sampling


class TokenChooser:
    """Chooses the tokens of one row."""

    def __init__(self, sampling: Sampling, prompt: torch.Tensor, ends: list[int], number: int = 0):
        """``prompt`` [p] on the model's device; ``number`` tells prompts apart that share a seed."""
        self.sampling = sampling
        self.processors = _processors(sampling, len(prompt), ends, prompt.device)
        self.plain = not self.processors and not sampling.do_sample
        self._seen = prompt
        self._generator: torch.Generator | None = None
        if sampling.do_sample:
            self._generator = torch.Generator(prompt.device)
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(stream_key("sample", sampling.seed, number))

    def choose(self, logits: torch.Tensor, new: list[int]) -> int:
        """The token that follows the prompt and ``new``; logits [V]."""
        answered = torch.tensor(new, dtype=torch.long, device=logits.device)
        scores = self.processors(torch.cat([self._seen, answered])[None], logits.float()[None])  # [1, V]
        if self._generator is None:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))


def _processors(sampling: Sampling, prompt: int, ends: list[int], device: torch.device) -> LogitsProcessorList:
    """transformers' processors for every option that differs from its default, in transformers' own order."""
    from transformers.generation import logits_process as lp

    shaping = {
        "repetition_penalty": lp.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": lp.NoRepeatNGramLogitsProcessor,
        "min_new_tokens": lambda n: lp.MinNewTokensLengthLogitsProcessor(prompt, n, ends, device=str(device)),
    }
    warping = {
        "temperature": lp.TemperatureLogitsWarper,
        "top_k": lp.TopKLogitsWarper,
        "top_p": lp.TopPLogitsWarper,
        "min_p": lp.MinPLogitsWarper,
        "typical_p": lp.TypicalLogitsWarper,
    }
    makers = {**shaping, **warping} if sampling.do_sample else shaping
    return lp.LogitsProcessorList(
        make(getattr(sampling, name))
        for name, make in makers.items()
        if getattr(sampling, name) != getattr(Sampling, name)
    )
