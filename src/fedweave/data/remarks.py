"""What is not wrong with own data but worth a remark: files left aside, misleading names, rows that stand twice."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedweave.data.examples import Example
from fedweave.data.files import shown, split_name

Asked = str | tuple[tuple[str, str], ...]  # a prompt, or its turns
Key = tuple[Asked, str]

# Names that people give to held-out rows; here they would be clients.
_MEANT = {
    **dict.fromkeys(("val", "valid", "dev", "eval"), "validation"),
    **dict.fromkeys(("testing", "holdout", "held_out"), "test"),
}
_DATA_LIKE = ("json", "csv", "tsv", "parquet", "ndjson", "xls", "arrow")


def look_alikes(files: Iterable[Path]) -> list[str]:
    """Files of a folder that look like data and are not read."""
    out = []
    for path in files:
        name = shown(path.name)
        if split_name(path.name) is not None:
            continue
        if any(f".{kind}" in name.lower() for kind in _DATA_LIKE):
            out.append(f"{name} looks like data and is not read; clients are .jsonl, .csv, .tsv or .parquet files.")
        elif _holds_data(path):
            out.append(f"{name}/ holds data files and is not read; a client is a file of the folder itself.")
    return out


def _holds_data(folder: Path) -> bool:
    try:
        return folder.is_dir() and any(split_name(p.name) for p in folder.iterdir() if not p.name.startswith("."))
    except OSError:
        return False


def odd_names(named: Mapping[str, Path]) -> list[str]:
    """Files that are clients by their names, and perhaps not meant to be."""
    out = []
    for name, path in named.items():
        meant = _MEANT.get(name.lower())
        if meant:
            renamed = path.name.replace(name, meant, 1)
            out.append(f"{path.name} is the client {name!r}; rename it to {renamed} if it is to be held out.")
        elif name.lower() in ("train", "training"):
            out.append(
                f"{path.name} is one client, {name!r}; a federation has a file for each, or a column 'client'."
            )
    return out


def row_key(example: Example) -> Key:
    """Equal for rows that say the same."""
    prompt = example.prompt
    asked = prompt.strip() if isinstance(prompt, str) else tuple((m["role"], m["content"].strip()) for m in prompt)
    return asked, example.response.strip()


def overlap(clients: Mapping[str, Sequence[Example]], held: Sequence[Example]) -> list[tuple[Example, Example]]:
    """(held-out row, the same row in training) of every held-out row that some client trains on."""
    trained = {row_key(e): e for rows in clients.values() for e in reversed(rows)}
    return [(e, trained[key]) for e in held if (key := row_key(e)) in trained]


def overlap_note(clients: Mapping[str, Sequence[Example]], held: Mapping[str, Sequence[Example]]) -> list[str]:
    out = []
    for name, rows in held.items():
        both = overlap(clients, rows)
        if both:
            first, same = both[0]
            out.append(
                f"{len(both)} of {len(rows)} {name} rows also stand in train ({first.origin} is {same.origin}), so "
                "their figures flatter the model."
            )
    return out
