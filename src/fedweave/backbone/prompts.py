"""Examples to tokens: rendering, truncation, and the span of tokens that the prompt feature averages.

``plain`` renders the prompt, a blank line, ``Response:``, a space and the answer, and a conversation as such pairs
one after another; ``chat`` renders the tokenizer's template. The feature averages the whole rendered prompt, as in
the paper. A template's constant parts (system prompt, role marks) are the same for every example and can drown what
differs: with ``backbone.pool=content`` the feature averages the user's words alone. Of a conversation the router
reads the last user turn as if it were asked alone (``backbone.turns=last``): whatever was spoken of before, the
expert is the one that this question would get.

Too long? The prompt's words lose tokens from their beginning; the template and the answer stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jinja2 import TemplateError

from fedweave.config import BackboneConfig
from fedweave.data.examples import Example, Message, Prompt
from fedweave.errors import UserError, first_line

T = TypeVar("T")

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class EncodedPrompt:
    ids: np.ndarray  # [p]
    pool: tuple[int, int]  # span of ids that the feature averages
    truncated: bool
    asked: EncodedPrompt | None = None  # the last turn, and no longer than in training, where that is less

    @property
    def routed(self) -> EncodedPrompt:
        """What the router reads."""
        return self.asked or self


@dataclass(frozen=True)
class Encoded:
    """One example in tokens. It carries no label: this is all that a method sees of an example."""

    prompt: EncodedPrompt
    ids: np.ndarray  # [p + a] prompt and answer
    answer_start: int

    @property
    def key(self) -> tuple[bytes, int]:
        """The same for the same row."""
        return self.ids.tobytes(), self.answer_start


class LongAnswer(UserError):
    """The answer leaves no room for its prompt."""


class RefusedChat(UserError):
    """The model's chat template takes no such messages."""


RESPONSE = "\n\nResponse:"  # what follows a plain prompt
SPEAKERS = {"system": "System: ", "user": "", "assistant": "Response: ", "tool": "Tool: "}  # of a plain chat


class PromptFormat:
    """Renders and tokenises in one fixed way; its settings are part of the feature cache's key."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, config: BackboneConfig):
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if config.prompt == "chat" and not has_template:
            raise UserError(
                f"backbone.prompt=chat, but the tokenizer of {config.model} has no chat template; "
                "use backbone.prompt=plain."
            )
        self.tokenizer = tokenizer
        self.kind = config.prompt if config.prompt != "auto" else "chat" if has_template else "plain"
        self.pool, self.turns = config.pool, config.turns
        self.max_length = config.max_length
        self.end_of_answer = config.end_of_answer
        try:
            self.end_id = self._end_token()
        except Exception as error:  # a template is a program, and fails as programs do
            reason = f"backbone.model={config.model}: its chat template cannot be used ({first_line(error)})"
            raise UserError(f"{reason}; mend it, or set backbone.prompt=plain.") from None

    def settings(self) -> dict[str, str | int | None]:
        """What decides the tokens of a prompt; part of every cache key and fingerprint."""
        template = getattr(self.tokenizer, "chat_template", None) if self.kind == "chat" else None
        settings = {"kind": self.kind, "pool": self.pool, "max_length": self.max_length, "template": template}
        # Unsaid where it is "last": models older than this key, trained on single questions, go on fitting.
        return settings | ({"turns": self.turns} if self.turns != "last" else {})

    # ---------------------------------------------------------------------------------- rendering

    def render(self, prompt: Prompt) -> tuple[str, int, int]:
        """The prompt as the model reads it, and the character span of the user's own words in it."""
        text = self._write(prompt)
        if self.kind == "plain":
            return text, 0, len(text) - len(RESPONSE)
        # Where the template puts the words: render once more with marks that it cannot contain itself.
        marked = [dict(m) for m in _turns(prompt)]
        asked = [m for m in marked if m["role"] != "system"]
        lead = len(asked[0]["content"]) - len(asked[0]["content"].lstrip())
        asked[0]["content"] = asked[0]["content"][:lead] + "\ue000" + asked[0]["content"][lead:]
        tail = len(asked[-1]["content"].rstrip())
        asked[-1]["content"] = asked[-1]["content"][:tail] + "\ue001" + asked[-1]["content"][tail:]
        shadow = self.tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
        first, last = shadow.find("\ue000"), shadow.find("\ue001") - 1
        if shadow.replace("\ue000", "").replace("\ue001", "") != text or first < 0 or last < first:
            return text, 0, len(text)  # the template rewrote the words: pool over all of it
        return text, first, last

    def _write(self, prompt: Prompt) -> str:
        if self.kind == "plain":
            return write_plain(_turns(prompt))
        turns = _turns(prompt)
        if all(m["role"] == "system" for m in turns):
            raise RefusedChat("messages: nobody asks anything; add a message of the user.")
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:  # some know no system role, or insist on an order of roles
            raise RefusedChat(f"messages: the chat template refuses them ({first_line(error)}).") from None

    def _end_token(self) -> int | None:
        """The token that truly ends an answer: what the chat template puts behind it, else EOS."""
        eos = self.tokenizer.eos_token_id
        if self.kind == "chat":
            turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
            text = self.tokenizer.apply_chat_template(turn, tokenize=False)
            behind = self._ids([text[text.rfind("answer") + len("answer") :]], special=False)[0]
            if behind and behind[0] in set(self.tokenizer.all_special_ids):
                return behind[0]
        return eos

    # ---------------------------------------------------------------------------------- tokenising

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []

    def encode_prompts(self, prompts: Sequence[Prompt], room: int | None = None) -> list[EncodedPrompt]:
        """Tokens of prompts alone, as discovery, the router and generation read them; at most as many as in
        training, or ``room``."""
        return self._whole(prompts, self._tokenise(list(map(self.render, prompts))), room or self.max_length)

    def _whole(
        self, prompts: Sequence[Prompt], tokenised: Sequence[tuple[list[int], tuple[int, int]]], room: int
    ) -> list[EncodedPrompt]:
        """Prompts of at most ``room`` tokens, each with what the router reads of it."""
        fitted = [self._fit(ids, span, room) for ids, span in tokenised]
        for i, (ids, span) in enumerate(tokenised):
            if len(fitted[i].ids) > self.max_length:
                fitted[i] = replace(fitted[i], asked=self._fit(ids, span, self.max_length))
        if self.turns == "last":
            alone = {i: turn for i, prompt in enumerate(prompts) if (turn := last_turn(prompt)) != prompt}
            tokens = self._tokenise(list(map(self.render, alone.values())))
            for i, (ids, span) in zip(alone, tokens, strict=True):
                fitted[i] = replace(fitted[i], asked=self._fit(ids, span, self.max_length))
        return fitted

    def encode_raw(self, text: str | Sequence[int], room: int | None = None) -> EncodedPrompt:
        """A text, or tokens, exactly as given: no template, nothing cut, but marked where it has more than ``room``
        tokens. The router reads as much of its end as it did in training."""
        ids = self._ids([text], special=True)[0] if isinstance(text, str) else list(text)
        if ids and not 0 <= min(ids) <= max(ids) < len(self.tokenizer):
            raise UserError(f"a prompt's token ids must lie between 0 and {len(self.tokenizer) - 1}.")
        whole, end = np.array(ids, dtype=np.int32), min(len(ids), self.max_length)
        asked = EncodedPrompt(whole[-end:], (0, end), True) if end < len(ids) else None
        return EncodedPrompt(whole, (0, len(ids)), len(ids) > (room or self.max_length), asked)

    def encode(self, examples: Sequence[Example]) -> list[Encoded]:
        """Tokens of prompt and answer, as training and teacher-forced evaluation read them."""
        prompts = self._tokenise([self._row(self.render, e) for e in examples])
        answers = self._answers(examples)
        joint = []
        for example, (ids, span), answer in zip(examples, prompts, answers, strict=True):
            try:
                joint.append(self._fit(ids, span, self.max_length - len(answer)).ids)
            except LongAnswer:
                raise LongAnswer(
                    f"{example.origin}: the answer has {len(answer)} tokens and leaves no room for its prompt "
                    f"within backbone.max_length={self.max_length}; shorten it, drop such rows with "
                    "data.long_answers=skip, or raise that length for a new run."
                ) from None
        alone = self._whole([e.prompt for e in examples], prompts, self.max_length)
        return [
            Encoded(prompt, np.concatenate([ids, np.array(answer, dtype=np.int32)]), len(ids))
            for prompt, ids, answer in zip(alone, joint, answers, strict=True)
        ]

    def encode_fitting(
        self, rows: Sequence[Example], long_answers: str, warn: Callable[[str], None]
    ) -> tuple[list[Example], list[Encoded]]:
        """(rows, their tokens), where an answer that leaves no room is an error, or drops its row."""
        try:
            return list(rows), self.encode(rows)
        except LongAnswer:
            if long_answers == "error":
                raise
        kept = []
        for row in rows:
            with suppress(LongAnswer):
                kept.append((row, self.encode([row])[0]))
        warn(f"{len(rows) - len(kept)} rows were dropped because their answers leave no room for a prompt.")
        return [row for row, _ in kept], [encoded for _, encoded in kept]

    def sizes(self, examples: Sequence[Example]) -> list[tuple[int, int]]:
        """Tokens of each rendered prompt and of its answer with nothing cut, counted without looking at them."""
        texts = [self._row(self._write, e) for e in examples]
        prompts = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=self.kind == "plain")
        return [(len(p), len(a)) for p, a in zip(prompts, self._answers(examples), strict=True)]

    def _row(self, read: Callable[[Prompt], T], example: Example) -> T:
        """``read`` of a row's prompt; a refusal names the row."""
        try:
            return read(example.prompt)
        except RefusedChat as error:
            raise RefusedChat(
                f"{example.origin}: {str(error).rstrip('.')}; put the system message into the user's, let user and "
                "assistant take turns, or set backbone.prompt=plain."
            ) from None

    def _tokenise(self, rendered: Sequence[tuple[str, int, int]]) -> list[tuple[list[int], tuple[int, int]]]:
        if not rendered:
            return []
        # A chat template writes its own BOS; a plain prompt takes the tokenizer's.
        batch = self.tokenizer(
            [text for text, _, _ in rendered], add_special_tokens=self.kind == "plain", return_offsets_mapping=True
        )
        out = []
        for ids, offsets, (_, start, end) in zip(
            batch["input_ids"], batch["offset_mapping"], rendered, strict=True
        ):
            inside = [i for i, (a, b) in enumerate(offsets) if b > a and a < end and b > start]
            out.append((ids, (inside[0], inside[-1] + 1) if inside else (0, len(ids))))
        return out

    def _answers(self, examples: Sequence[Example]) -> list[list[int]]:
        if self.kind == "plain":
            # The blank before the answer belongs to it: measured against "Response:" so that SentencePiece
            # tokenizers, which add a blank of their own, split it in the same place.
            head = self._ids(["Response:"], special=False)[0]
            whole = self._ids([f"Response: {e.response.strip()}" for e in examples], special=False)
            answers = [ids[len(head) :] for ids in whole]
        else:
            answers = self._ids([e.response.strip() for e in examples], special=False)
        if self.end_of_answer and self.end_id is not None:
            answers = [[*ids, self.end_id] for ids in answers]
        return answers

    def _fit(self, ids: list[int], span: tuple[int, int], room: int) -> EncodedPrompt:
        """Drop the excess from the beginning of the words; the template around them stays."""
        start, end = span
        excess = max(0, len(ids) - room)
        if excess > end - start - 1:
            raise LongAnswer(f"backbone.max_length={self.max_length} leaves no room for the prompt's words.")
        kept = np.array(ids[:start] + ids[start + excess :], dtype=np.int32)
        pool = (start, end - excess) if self.pool == "content" else (0, len(kept))
        return EncodedPrompt(kept, pool, excess > 0)


def _turns(prompt: Prompt) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def write_plain(turns: Sequence[Message]) -> str:
    """Turns without a template: what the system says first and what the user says stand as they are, an answer
    stands behind ``Response:`` as in training, and any other speaker is named."""
    for m in turns:
        if m["role"] not in SPEAKERS:
            raise RefusedChat(f"messages: a role is one of {', '.join(SPEAKERS)}, not {m['role']!r}.")
    spoken = [
        ("" if i == 0 and m["role"] == "system" else SPEAKERS[m["role"]]) + m["content"]
        for i, m in enumerate(turns)
    ]
    return "\n\n".join(spoken).rstrip() + RESPONSE


def last_turn(prompt: Prompt) -> Prompt:
    """The last question of a conversation as if asked alone, behind the system prompt where there is one."""
    if isinstance(prompt, str):
        return prompt
    asked = [i for i, m in enumerate(prompt) if m["role"] == "user"]
    if not asked:
        return prompt
    system = [m for m in prompt[: asked[-1]] if m["role"] == "system"][:1]
    return (*system, prompt[asked[-1]])
