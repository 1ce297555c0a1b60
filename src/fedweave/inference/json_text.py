"""JSON mode: a text that can still become a JSON object, character by character, and the tokens that keep it so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LITERALS = ("true", "false", "null")
_BLANKS = " \n\t\r"


class JsonText:
    """Where a JSON object stands: what is open, and what may come next. Blanks are allowed where JSON allows them,
    but no two in a row, so that a model cannot go on with them for ever."""

    def __init__(self, other: JsonText | None = None):
        self.open: list[str] = list(other.open) if other else []  # of objects and lists, from the outside
        self.expects: str = other.expects if other else "object"
        self.word: str = other.word if other else ""  # the literal, number or escape under way
        self.blank: bool = other.blank if other else False

    @property
    def complete(self) -> bool:
        return self.expects == "nothing"

    def add(self, text: str) -> bool:
        """Whether the text so far and ``text`` can still become an object; if not, this one is spoilt."""
        return all(self._step(c) for c in text)

    def _step(self, c: str) -> bool:
        if self.expects in ("key text", "text"):
            return self._in_text(c)
        if self.word:
            if self._goes_on(c):
                self.word += c
                if self.word in _LITERALS:
                    self._value_ends()
                return True
            if not _is_number(self.word):
                return False
            self._value_ends()  # a number ends with what follows it
        if c in _BLANKS:
            again, self.blank = self.blank, True
            return not again
        self.blank = False
        return self._mark(c)

    def _in_text(self, c: str) -> bool:
        if self.word:  # an escape
            self.word += c
            if self.word[1] == "u":
                if len(self.word) > 2 and c not in "0123456789abcdefABCDEF":
                    return False
                self.word = "" if len(self.word) == 6 else self.word
                return True
            self.word = ""
            return c in '"\\/bfnrt'
        if c == "\\":
            self.word = c
        elif c == '"':
            if self.expects == "key text":
                self.expects = "colon"
            else:
                self._value_ends()
        return c >= " "

    def _goes_on(self, c: str) -> bool:
        if self.word[0] in "tfn":
            return any(word.startswith(self.word + c) for word in _LITERALS)
        return _begins_number(self.word + c)

    def _mark(self, c: str) -> bool:
        if self.expects == "object":
            return c == "{" and self._begin(c)
        if self.expects == "colon":
            self.expects = "value"
            return c == ":"
        if c == '"' and self.expects in ("key", "key or end", "value", "value or end"):
            self.expects = "key text" if self.expects.startswith("key") else "text"
            return True
        if c in "}]" and self.expects in ("comma or end", "key or end", "value or end"):
            if self.open.pop() != c:
                return False
            self._value_ends()
            return True
        if self.expects == "comma or end":
            self.expects = "key" if self.open[-1] == "}" else "value"
            return c == ","
        if self.expects in ("value", "value or end"):
            if c in "{[":
                return self._begin(c)
            self.word = c
            return c in "tfn" or _begins_number(c)
        return False

    def _begin(self, c: str) -> bool:
        self.open.append("}" if c == "{" else "]")
        self.expects = "key or end" if c == "{" else "value or end"
        return True

    def _value_ends(self) -> None:
        self.word = ""
        self.expects = "comma or end" if self.open else "nothing"


def _begins_number(text: str) -> bool:
    """Whether something may follow that makes ``text`` a number."""
    return any(_is_number(text + rest) for rest in ("", "0"))


def _is_number(text: str) -> bool:
    body = text.removeprefix("-")
    mantissa, e, exponent = body.replace("E", "e").partition("e")
    whole, dot, part = mantissa.partition(".")
    digits = whole.isascii() and whole.isdecimal() and (whole == "0" or whole[0] != "0")
    fraction = not dot or (part.isascii() and part.isdecimal())
    power = exponent[1:] if exponent[:1] in ("+", "-") else exponent
    return digits and fraction and (not e or (power.isascii() and power.isdecimal()))


class JsonTokens:
    """The tokens of one answer that is to be a JSON object."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, ends: list[int]):
        self.text, self._tokenizer, self._ends = JsonText(), tokenizer, ends
        # alone, a token of SentencePiece loses the blank that it begins with
        self._before = tokenizer.encode("{", add_special_tokens=False)
        self._known = len(self._decode(self._before))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def take(self, token: int) -> bool:
        """Add a token, if it can follow."""
        if token in self._ends:
            return self.text.complete
        piece = self._decode([*self._before, token])[self._known :]
        tried = JsonText(self.text)
        if not piece or self.text.complete or not tried.add(piece):
            return False
        self.text = tried
        return True
