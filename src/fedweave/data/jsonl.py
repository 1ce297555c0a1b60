"""A user's own data: a folder with one JSONL file per client.

Rows are ``{"prompt": …, "response": …}`` or chat ``{"messages": [{"role": …, "content": …}, …]}`` whose last
message is the assistant's. An optional ``task`` label is used for the audit alone. ``validation.jsonl`` and
``test.jsonl`` hold out examples for everyone; without them every client keeps a share of its rows back.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedweave.config import DataConfig, EvaluationConfig
from fedweave.data.examples import Example, FederatedData, Prompt, Task
from fedweave.errors import UserError
from fedweave.streams import stream_key

HELD_OUT = ("validation", "test")
ROLES = ("system", "user", "assistant", "tool")
UNLABELLED = "all"


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of a JSONL file, gzipped or not; lines end at \\n alone."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as source:
            data = source.read()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except UnicodeError:
            raise UserError(f"{path}:{number}: not UTF-8 text; save the file as UTF-8.") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not valid JSON ({error}); every line must be one object.") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: a row must be a JSON object, not a {type(row).__name__}.")
        yield number, row


def read_examples(path: Path) -> list[Example]:
    """The rows of one file as examples."""
    return [_example(row, f"{path.name}:{number}") for number, row in read_rows(path)]


def _example(row: dict[str, Any], where: str) -> Example:
    task = row.get("task", UNLABELLED)
    if not isinstance(task, str) or not task:
        raise UserError(f"{where}: 'task' must be a non-empty text, not {task!r}; leave it out if unknown.")
    if "messages" in row:
        prompt, response = _messages(row["messages"], where)
        return Example(prompt, response, task, where)
    for key in ("prompt", "response"):
        if key not in row:
            raise UserError(
                f"{where}: no {key!r}; a row needs 'prompt' and 'response', or 'messages' (it has "
                f"{', '.join(map(repr, row)) or 'no keys'})."
            )
        if not isinstance(row[key], str) or not row[key].strip():
            raise UserError(f"{where}: {key!r} must be a non-empty text, not {row[key]!r}.")
    return Example(row["prompt"], row["response"], task, where)


def _messages(messages: Any, where: str) -> tuple[Prompt, str]:
    if not isinstance(messages, list) or len(messages) < 2:
        raise UserError(f"{where}: 'messages' must list at least a user's and an assistant's message.")
    for m in messages:
        if not isinstance(m, dict) or m.get("role") not in ROLES or not isinstance(m.get("content"), str):
            raise UserError(f"{where}: a message needs 'role' (one of {', '.join(ROLES)}) and text 'content'.")
    *prompt, last = messages
    if last["role"] != "assistant" or not last["content"].strip():
        raise UserError(f"{where}: the last message must be the assistant's non-empty answer.")
    asked = [m["content"] for m in prompt if m["role"] == "user"]
    if not asked or not all(text.strip() for text in asked):
        raise UserError(f"{where}: there is no user message before the answer, or it is empty.")
    return tuple({"role": m["role"], "content": m["content"]} for m in prompt), last["content"]


def load_client_folder(config: DataConfig, evaluation: EvaluationConfig, seed: int) -> FederatedData:
    """Clients, validation and test examples of a folder."""
    folder = Path(str(config.path)).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.path={config.path}: there is no such folder.")
    files = sorted(p for p in folder.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz")))
    stems = {p.name.split(".jsonl")[0]: p for p in files}
    if len(stems) < len(files):
        twice = next(p for p in files if stems[p.name.split(".jsonl")[0]] != p)
        raise UserError(f"{twice} and {stems[twice.name.split('.jsonl')[0]].name} are the same client; keep one.")
    client_files = {name: p for name, p in stems.items() if name not in HELD_OUT}
    if not client_files:
        raise UserError(f"data.path={config.path}: the folder holds no client file; it needs one NAME.jsonl each.")
    held: dict[str, list[Example]] = {k: read_examples(stems[k]) if k in stems else [] for k in HELD_OUT}
    clients = {}
    for index, (name, path) in enumerate(client_files.items()):
        rows = read_examples(path)
        if not rows:
            raise UserError(f"{path}: client {name!r} is empty; add examples or remove the file.")
        missing = [k for k in HELD_OUT if k not in stems]
        clients[name] = hold_out(rows, missing, held, config.holdout, stream_key("holdout", seed, index))
    for k in HELD_OUT:
        if not held[k]:
            raise UserError(
                f"data.path={config.path}: no {k} example is left; add {k}.jsonl, more rows (a client needs "
                f"{int(np.ceil(1 / config.holdout)) if config.holdout else 'some'} to keep one back), or raise "
                "data.holdout."
            )
    labels = sorted({e.task for rows in [*clients.values(), *held.values()] for e in rows})
    tasks = {t: Task(t, t, "rouge", evaluation.max_new_tokens) for t in labels}
    return FederatedData(clients, held["validation"], held["test"], tasks)


def hold_out(
    rows: list[Example], missing: list[str], held: dict[str, list[Example]], share: float, key: int
) -> list[Example]:
    """Move a share of one client's rows to each held-out set that has no file; at least one row stays."""
    order = np.random.default_rng(key).permutation(len(rows))
    count = int(share * len(rows))
    start = 0
    for k in missing:
        held[k] += [rows[i] for i in sorted(order[start : start + count])]
        start += count
    return [rows[i] for i in sorted(order[start:])]
