"""Examples to tokens, with a rule for rows that are too long."""

from __future__ import annotations

from collections.abc import Sequence

from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import Encoded, LongAnswer
from fedweave.console import Console
from fedweave.data.examples import Example


def encode(
    backbone: Backbone, rows: Sequence[Example], long_answers: str, console: Console
) -> tuple[list[Example], list[Encoded]]:
    """Tokenise; a row whose answer leaves no room is an error, or is dropped and counted."""
    try:
        return list(rows), backbone.prompts.encode(rows)
    except LongAnswer:
        if long_answers == "error":
            raise
    kept = []
    for row in rows:
        try:
            kept.append((row, backbone.prompts.encode([row])[0]))
        except LongAnswer:
            continue
    console.warn(f"{len(rows) - len(kept)} rows were dropped because their answers leave no room for a prompt.")
    return [row for row, _ in kept], [encoded for _, encoded in kept]
