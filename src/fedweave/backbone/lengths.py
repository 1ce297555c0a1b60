"""Rows as a model reads them: how many tokens, what is cut, what is refused, and how one is written out."""

from collections.abc import Sequence

from fedweave.backbone.prompts import LongAnswer, PromptFormat, RefusedChat
from fedweave.data.check import Length
from fedweave.data.examples import Example
from fedweave.errors import UserError

CHUNK = 1000


class Tokens:
    """A model's reading of rows, for a check; it needs the tokenizer alone."""

    unit = "tokens"

    def __init__(self, prompts: PromptFormat):
        self.prompts = prompts

    def lengths(self, rows: Sequence[Example]) -> list[Length]:
        out: list[Length] = []
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            try:
                out += self._lengths(chunk)
            except RefusedChat:  # one of them; ask each
                out += [self._alone(row) for row in chunk]
        return out

    def _lengths(self, rows: Sequence[Example]) -> list[Length]:
        """A row that may not fit whole is encoded as the run would."""
        out = []
        for row, (prompt, answer) in zip(rows, self.prompts.sizes(rows), strict=True):
            excess = max(0, prompt + answer - self.prompts.max_length)
            fault = ""
            if excess:
                try:
                    self.prompts.encode([row])
                except LongAnswer as error:
                    fault = str(error)
            out.append(Length(prompt, answer, 0 if fault else excess, fault, too_long=bool(fault)))
        return out

    def _alone(self, row: Example) -> Length:
        try:
            return self._lengths([row])[0]
        except RefusedChat as error:
            return Length(0, 0, fault=str(error))

    def show(self, row: Example) -> str:
        try:
            (encoded,) = self.prompts.encode([row])
        except UserError as error:
            return str(error)
        return self.prompts.tokenizer.decode(encoded.ids, clean_up_tokenization_spaces=False)
