"""Text in any script: its words, and the scripts that it is written in."""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

import regex

# Scripts that put no blanks between words: there a character stands for a word.
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_CHARACTER = regex.compile(rf"[{UNSPACED}]\p{{M}}*")
_WORD = regex.compile(rf"(?V1)[{UNSPACED}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}]--[{UNSPACED}]]+")


def words(text: str) -> list[str]:
    """Runs of letters and digits in lower case; in scripts without blanks every character. Of English text these
    are the tokens of the rouge-score package."""
    return _WORD.findall(normal(text))


def normal(text: str) -> str:
    """The same for texts that differ in case, or in how accents are written, alone."""
    return unicodedata.normalize("NFC", text).casefold()


def word_count(text: str) -> float:
    """About how many words a reader sees: two characters make one in scripts without blanks."""
    characters = len(_CHARACTER.findall(text))
    return len(words(text)) - characters / 2


def scripts(texts: Iterable[str]) -> dict[str, float]:
    """The share of every script among the letters, largest first."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    found: Counter[str] = Counter()
    for character, count in counts.items():
        if character.isalpha():
            found[_script(character)] += count
    total = found.total()
    return {name: count / total for name, count in found.most_common()}


@cache
def _script(character: str) -> str:
    """The first word of a letter's Unicode name: LATIN SMALL LETTER A is Latin."""
    first = unicodedata.name(character, "OTHER").split()[0].split("-")[0]
    return {"CJK": "Han", "FULLWIDTH": "Latin", "MATHEMATICAL": "symbols"}.get(first, first.capitalize())
