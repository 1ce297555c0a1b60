"""The paper's four tasks: where their rows come from and how a row becomes a prompt and an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fedweave.data.examples import Example, Task
from fedweave.data.jsonl import Row, read_rows
from fedweave.errors import UserError, first_line

Pool = list[Example]  # all rows of a task, official splits in order
SPLITS = ("train", "validation", "test")
SENTIMENTS = ("negative", "neutral", "positive")


@dataclass(frozen=True)
class Source:
    """One task's data set."""

    task: Task
    hub: str
    hub_config: str | None
    folders: tuple[str, ...]  # accepted names of a local folder; the first is the real data set
    convert: Callable[[Row], tuple[str, str]]


def _coedit(row: Row) -> tuple[str, str]:
    return row["src"], row["tgt"]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _gsm8k(row: Row) -> tuple[str, str]:
    ask = "Work out the answer in a few short steps. Put the result on a last line of the form #### <answer>."
    return f"{ask}\n\n{_text(row['question'])}", row["answer"]


def _tweet(row: Row) -> tuple[str, str]:
    ask = "What is the mood of this tweet? Reply with exactly one word: negative, neutral or positive."
    return f"{ask}\n\nTweet: {_text(row['text'])}", dict(enumerate(SENTIMENTS))[row["label"]]


def _arc(row: Row) -> tuple[str, str]:
    options = zip(row["choices"]["label"], row["choices"]["text"], strict=True)
    if row["answerKey"] not in row["choices"]["label"]:
        raise ValueError("answerKey is none of the labels")
    listed = "\n".join(f"({label}) {text}" for label, text in options)
    return f"Pick the right option and reply with its letter only.\n\n{row['question']}\n{listed}", row["answerKey"]


# The order fixes the sampling seeds of the splits.
SOURCES = [
    Source(Task("coedit", "CoEdIT", "rouge", 64), "grammarly/coedit", None, ("coedit", "coedit_style"), _coedit),
    Source(Task("gsm8k", "GSM8K", "number", 192), "openai/gsm8k", "main", ("gsm8k",), _gsm8k),
    Source(
        Task("tweet", "TweetEval", "label", 4),
        "cardiffnlp/tweet_eval",
        "sentiment",
        ("tweet_eval_sentiment", "tweet_eval"),
        _tweet,
    ),
    Source(
        Task("arc", "ARC-C", "letter", 4),
        "allenai/ai2_arc",
        "ARC-Challenge",
        ("ai2_arc_challenge", "ai2_arc"),
        _arc,
    ),
]

STAND_IN = (
    "CoEdIT-style is a stand-in for CoEdIT: its schema and instructions over other public corpora. Its figures "
    "are not CoEdIT's."
)


def load_paper_tasks(path: str | None) -> tuple[dict[str, Pool], dict[str, Task], list[str]]:
    """(pools, tasks, notes) from a local folder, or from the hub when ``path`` is empty."""
    pools, tasks, notes = {}, {}, []
    for source in SOURCES:
        if path is None:
            pool = _from_hub(source)
        else:
            folder = _find_folder(Path(path).expanduser(), source)
            if folder.name == "coedit_style":  # under its own name in every output, not only in the tables
                source = replace(source, task=replace(source.task, name="coedit_style", title="CoEdIT-style"))
                notes.append(STAND_IN)
            pool = _from_folder(source, folder)
        pools[source.task.name], tasks[source.task.name] = pool, source.task
    return pools, tasks, notes


def _find_folder(root: Path, source: Source) -> Path:
    if not root.is_dir():
        raise UserError(f"data.path={root}: there is no such folder.")
    for name in source.folders:
        if (root / name).is_dir():
            return root / name
    raise UserError(
        f"data.path={root}: {source.task.title} is missing; it needs a folder {source.folders[0]} with "
        "train.jsonl or train.jsonl.gz and the other official splits."
    )


def _from_folder(source: Source, folder: Path) -> Pool:
    pool: Pool = []
    for split in SPLITS:
        for path in (folder / f"{split}.jsonl", folder / f"{split}.jsonl.gz"):
            if path.is_file():
                pool += [
                    _example(source, row, split, n - 1, f"{path}:{n}", folder.name) for n, row in read_rows(path)
                ]
                break
    if not pool:
        raise UserError(f"{folder} holds no row; it needs train.jsonl or train.jsonl.gz.")
    return pool


def _from_hub(source: Source) -> Pool:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            "data.source=paper without data.path reads the hub and needs the datasets package: "
            "pip install 'fedweave[hub]', or name a local folder in data.path."
        ) from None
    try:
        splits = load_dataset(source.hub, source.hub_config)
    except Exception as error:
        reason = first_line(error)
        raise UserError(
            f"{source.task.title} cannot be loaded from the hub as {source.hub} ({reason}); connect to the hub "
            "or name a local folder in data.path."
        ) from error
    where = source.hub
    return [
        _example(source, row, split, n, f"{where}/{split}:{n}")
        for split in SPLITS
        if split in splits
        for n, row in enumerate(splits[split])
    ]


def _example(source: Source, row: Row, split: str, index: int, where: str, name: str = "") -> Example:
    try:
        prompt, answer = source.convert(row)
        if not prompt.strip() or not answer.strip():
            raise ValueError("empty prompt or answer")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where} is no {source.task.title} row: {type(error).__name__} {error}.") from None
    return Example(prompt.strip(), answer.strip(), source.task.name, f"{name or source.folders[0]}/{split}:{index}")
