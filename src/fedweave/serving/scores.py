"""Log-probabilities as OpenAI clients read them."""

from collections.abc import Callable, Sequence
from typing import Literal

from fedweave.inference.rows import TokenScore
from fedweave.serving.protocol import Json


def logprobs(
    kind: Literal["chat", "text"], scores: Sequence[TokenScore], text: Callable[[int], str], start: int = 0
) -> Json:
    """Of an answer's tokens, whose texts ``text`` gives, after so many letters."""
    if kind == "chat":
        return {
            "content": [
                _entry(score.token, score.logprob, text)
                | {"top_logprobs": [_entry(token, logprob, text) for token, logprob in score.top.items()]}
                for score in scores
            ]
        }
    tokens = [text(score.token) for score in scores]
    offsets = [start]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [
            None if score.logprob is None else {text(token): logprob for token, logprob in score.top.items()}
            for score in scores
        ],
        "text_offset": offsets[:-1],
    }


def _entry(token: int, logprob: float | None, text: Callable[[int], str]) -> Json:
    return {"token": text(token), "logprob": logprob, "bytes": list(text(token).encode())}
