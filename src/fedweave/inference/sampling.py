"""How the next token is chosen. Options carry the names of transformers' GenerationConfig, and its own logits
processors do the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch

from fedweave.errors import UserError
from fedweave.inference.json_text import JsonTokens
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
    frequency_penalty: float = setting(
        0.0, "Taken off a token's logit for every time that the answer has it.", low=-2.0, high=2.0
    )
    presence_penalty: float = setting(0.0, "Taken off once the answer has the token.", low=-2.0, high=2.0)
    no_repeat_ngram_size: int = setting(0, "No n-gram of that length occurs twice; 0 allows all.", low=0)
    stop_strings: tuple[str, ...] = setting((), "The answer ends before the first of these.")
    stop_token_ids: tuple[int, ...] = setting((), "Tokens that end the answer, besides the model's own.")
    json_object: bool = setting(False, "The answer is a JSON object: only tokens that can go on to one are taken.")
    logprobs: int | None = setting(
        None, "Keep log-probabilities of the answer, and of so many likeliest tokens.", low=0
    )
    echo: bool = setting(False, "With logprobs: of the prompt's tokens as well.")
    seed: int | None = setting(None, "The same seed draws the same answer, whatever else is in the batch.")

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Sampling:
        """Options by name; an unknown one, or one without effect, is one sentence."""
        given = {name: value for name, value in options.items() if value is not None and value not in ([], ())}
        sampling = build(cls, given, what="generation option")
        idle = [name for name in given if name in _ONLY_SAMPLED]
        if idle and not sampling.do_sample:
            raise UserError(f"{idle[0]} has no effect on greedy decoding; add do_sample=True.")
        if sampling.min_new_tokens > sampling.max_new_tokens:
            raise UserError("min_new_tokens must not be more than max_new_tokens.")
        if sampling.echo and sampling.logprobs is None:
            raise UserError("echo has no effect without logprobs.")
        if not all(sampling.stop_strings):
            raise UserError("stop_strings must not hold an empty text.")
        if not all(0 <= token < 2**31 for token in sampling.stop_token_ids):
            raise UserError("stop_token_ids: a token is a number from 0 to 2147483647.")
        return sampling


class Options(TypedDict, total=False):
    """The same options as keywords of :meth:`FedWeaveModel.generate`; None leaves a default."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    no_repeat_ngram_size: int | None
    stop_strings: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    json_object: bool | None
    logprobs: int | None
    echo: bool | None
    seed: int | None


class TokenChooser:
    """Chooses the tokens of one row."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: torch.Tensor,
        ends: list[int],
        number: int = 0,
        grammar: JsonTokens | None = None,
    ):
        """``prompt`` [p] on the model's device; ``number`` tells prompts apart that share a seed; ``grammar`` says
        which tokens may follow."""
        self.sampling, self.grammar = sampling, grammar
        self.processors = _processors(sampling, len(prompt), ends, prompt.device)
        self.plain = not self.processors and not sampling.do_sample and grammar is None
        self._seen, self._ends = prompt, ends
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
        return self._draw(scores) if self.grammar is None else self._fitting(self.grammar, scores, logits.float())

    def _fitting(self, grammar: JsonTokens, scores: torch.Tensor, logits: torch.Tensor) -> int:
        """A token that the grammar takes. Options may leave none of those that it does: then the likeliest of all;
        a text that is whole ends, however long it was to be."""
        if grammar.text.complete:
            return self._ends[0]
        shaped, every = scores.clone(), logits.clone()[None]  # those of the batch are read again
        while bool(every.isfinite().any()):
            left = bool(shaped.isfinite().any())
            token = self._draw(shaped) if left else int(every.argmax())
            if grammar.take(token):
                return token
            shaped[0, token] = every[0, token] = -torch.inf
        return self._ends[0]

    def _draw(self, scores: torch.Tensor) -> int:
        if self._generator is None or not scores.isfinite().any():  # a request may rule every token out
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))


class _Penalties:
    """OpenAI's penalties: by how often, and whether at all, the answer so far has a token."""

    def __init__(self, sampling: Sampling, prompt: int):
        self.sampling, self.prompt = sampling, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """ids [1, p + new], scores [1, V]."""
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[1]).to(scores)  # [V]
        return scores - self.sampling.frequency_penalty * counts - self.sampling.presence_penalty * (counts > 0)


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
    chosen = lp.LogitsProcessorList(
        make(getattr(sampling, name))
        for name, make in makers.items()
        if getattr(sampling, name) != getattr(Sampling, name)
    )
    if sampling.frequency_penalty or sampling.presence_penalty:
        chosen.insert(0, _Penalties(sampling, prompt))
    return chosen
