"""From tokens to text, piece by piece: no piece splits a character, and stop strings are never shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class AnswerText:
    """The text of one answer as its tokens arrive. The pieces of :meth:`add` and :meth:`close` make up ``text``."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stops: tuple[str, ...] = (), trim: bool = True):
        """``trim`` drops the blanks around an answer, as its training pairs have none."""
        self.text = ""
        self.stopped = False  # a stop string came
        self._tokenizer, self._stops, self._trim = tokenizer._tokenizer, stops, trim
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._held = ""  # decoded, but perhaps the beginning of a stop string, or the blanks at the end

    def add(self, token: int) -> str:
        """What the next token makes certain."""
        return self.feed(self._decoder.step(self._tokenizer, token) or "")

    def feed(self, text: str) -> str:
        """The same for text that arrives decoded."""
        if self.stopped:
            return ""
        self._held += text
        cut = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if cut:
            self.stopped = True
            self._held = self._held[: min(cut)]
            return self.close()
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        return self._show(len(self._held) - keep, self._trim)

    def close(self) -> str:
        """The answer is complete: what was held back, but for blanks at the end."""
        return self._show(len(self._held.rstrip() if self._trim else self._held), False)

    def _show(self, end: int, hold_blanks: bool) -> str:
        shown, self._held = self._held[:end], self._held[end:]
        if hold_blanks:
            solid = shown.rstrip()
            shown, self._held = solid, shown[len(solid) :] + self._held
        if self._trim and not self.text:
            shown = shown.lstrip()
        self.text += shown
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` begin ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
