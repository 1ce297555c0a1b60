"""The paper's four tasks: where their rows come from and how a row becomes a prompt and an answer.

A wording is a template with ``{text}`` (the row's own input) and, where it wants them, ``{instruction}`` and
``{short}`` (a few words of the instruction). ``data.wording=varied`` draws one of its task's wordings for every
row, by the seed and the row's origin alone: people ask for the same thing in different words.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedweave.data.examples import Example, Task
from fedweave.data.files import Row, find_path, load_hub, read_rows
from fedweave.errors import UserError
from fedweave.metrics.scores import SENTIMENTS
from fedweave.streams import stream_key

USUAL = "{instruction}\n\n{text}"

# For a task that brings none of its own: the instruction before or after, whole or shortened, or missing.
WORDINGS = (
    USUAL,
    "{text}\n\n{instruction}",
    "{short}\n{text}",
    "{text}\n{short}",
    "{text}",
    "Hello! Can you help me with this?\n{instruction}\n\n{text}\n\nThank you.",
    "Input: {text}\nTask: {instruction}",
    "{text}\n\nThat was the input. {short} What do you answer?",
)

_PLACE = re.compile(r"\{(instruction|text|short)\}")


@dataclass(frozen=True)
class Request:
    """What a row asks for, before it is put into words."""

    instruction: str
    text: str
    short: str = ""  # the instruction in a few words; its first sentence where there are none


def render(template: str, request: Request) -> str:
    """The prompt. Braces in a row's own text stay what they are."""
    short = request.short or re.split(r"(?<=[.!?])\s", request.instruction.strip(), maxsplit=1)[0]
    values = {"instruction": request.instruction, "text": request.text, "short": short}
    return _PLACE.sub(lambda found: values[found.group(1)], template).strip()


def choose(wordings: Sequence[str], varied: bool, seed: int, origin: str) -> str:
    """The template of one row: its task's first, or one drawn for it."""
    return wordings[stream_key("wording", seed, origin) % len(wordings)] if varied else wordings[0]


Pool = list[Example]  # all rows of a task, official splits in order
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class TaskSource:
    task: Task
    hub: str
    hub_config: str | None
    folders: tuple[str, ...]  # accepted names of a local folder; the first is the real data set
    convert: Callable[[Row], tuple[Request, str]]
    wordings: tuple[str, ...]  # the first is the benchmark's, the others are for data.wording=varied


def _coedit(row: Row) -> tuple[Request, str]:
    """A row's source is its instruction, a colon and the text; without a colon it is all text."""
    ask, colon, text = row["src"].partition(": ")
    return (Request(f"{ask}:", text, ask) if colon else Request("", row["src"], "Edit")), row["tgt"]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _gsm8k(row: Row) -> tuple[Request, str]:
    ask = "Work out the answer in a few short steps. Put the result on a last line of the form #### <answer>."
    return Request(ask, _text(row["question"])), row["answer"]


def _tweet(row: Row) -> tuple[Request, str]:
    ask = "What is the mood of this tweet? Reply with exactly one word: negative, neutral or positive."
    return Request(ask, _text(row["text"])), dict(enumerate(SENTIMENTS))[row["label"]]


def _arc(row: Row) -> tuple[Request, str]:
    options = zip(row["choices"]["label"], row["choices"]["text"], strict=True)
    if row["answerKey"] not in row["choices"]["label"]:
        raise ValueError("answerKey is none of the labels")
    listed = "\n".join(f"({label}) {text}" for label, text in options)
    ask = "Pick the right option and reply with its letter only."
    return Request(ask, f"{_text(row['question'])}\n{listed}"), row["answerKey"]


_COEDIT_WORDINGS = (
    "{instruction} {text}",
    "{text}\n\n{short}.",
    "{text}\n({short})",
    "{text}",
    "Rewrite: {text}",
    "Please help me with my writing. {short}.\n\n{text}",
    "What I want: {short}\nWhat I have: {text}\nWhat I get:",
    'Could you edit this for me? "{text}" What I would like you to do: {short}.',
    "{text}\n\nEdit the text above. {short}.",
)
_GSM8K_WORDINGS = (
    USUAL,
    "{text}\n\n{instruction}",
    "Solve: {text}",
    "{text}",
    "{text}\nShow how you get there, then write #### and the number.",
    "Here is a word problem from my daughter's homework. How does one solve it, and what comes out?\n\n{text}",
    "Question: {text}\nReasoning and answer:",
    "Do the maths step by step and end with #### and the final number.\n{text}",
    "I am stuck with this one, please calculate it for me. {text}",
)
_TWEET_WORDINGS = (
    "{instruction}\n\nTweet: {text}",
    "{text}\n\n{instruction}",
    "Sentiment? {text}",
    "{text}",
    "{text}\n\nIs this negative, neutral or positive?",
    'Somebody wrote: "{text}" How does the writer feel about it?',
    "Label the post below as negative, neutral or positive.\nPost: {text}\nLabel:",
    "Does this message sound happy, unhappy or neither? Say positive, negative or neutral. {text}",
    "{text} -- good or bad mood?",
)
_ARC_WORDINGS = (
    USUAL,
    "{text}\n\n{instruction}",
    "Letter? {text}",
    "{text}",
    "Science quiz. {text}\nYour letter:",
    "Which of the options is correct? Give me just the letter in front of it.\n\n{text}",
    "{text}\n\nAnswer with one letter.",
    "I have to answer this in a test and I do not know what is right. {text}\nWhat should I tick?",
    "Question and options:\n{text}\nThe correct option is",
)

# The order fixes the sampling seeds of the splits.
SOURCES = [
    TaskSource(
        Task("coedit", "CoEdIT", "rouge", 64),
        "grammarly/coedit",
        None,
        ("coedit", "coedit_style"),
        _coedit,
        _COEDIT_WORDINGS,
    ),
    TaskSource(Task("gsm8k", "GSM8K", "number", 192), "openai/gsm8k", "main", ("gsm8k",), _gsm8k, _GSM8K_WORDINGS),
    TaskSource(
        Task("tweet", "TweetEval", "label", 4),
        "cardiffnlp/tweet_eval",
        "sentiment",
        ("tweet_eval_sentiment", "tweet_eval"),
        _tweet,
        _TWEET_WORDINGS,
    ),
    TaskSource(
        Task("arc", "ARC-C", "letter", 4),
        "allenai/ai2_arc",
        "ARC-Challenge",
        ("ai2_arc_challenge", "ai2_arc"),
        _arc,
        _ARC_WORDINGS,
    ),
]

STAND_IN = (
    "CoEdIT-style is a stand-in for CoEdIT: its schema and instructions over other public corpora. Its figures "
    "are not CoEdIT's."
)


def load_paper_tasks(
    path: str | None, varied: bool = False, seed: int = 0
) -> tuple[dict[str, Pool], dict[str, Task], list[str]]:
    """(pools, tasks, notes) from a local folder, or from the hub when ``path`` is empty; with ``varied`` every row
    has one of its task's wordings."""
    pools, tasks, notes = {}, {}, []
    for source in SOURCES:
        folder = _find_folder(find_path(path), source) if path is not None else None
        if folder is not None and folder.name == "coedit_style":  # its own name everywhere, not only in tables
            source = replace(source, task=replace(source.task, name="coedit_style", title="CoEdIT-style"))
            notes.append(STAND_IN)
        name = folder.name if folder else source.folders[0]
        rows = _folder_rows(folder) if folder else _hub_rows(source)
        pools[source.task.name] = [
            _example(source, row, f"{name}/{split}:{n}", where, varied, seed) for split, n, where, row in rows
        ]
        tasks[source.task.name] = source.task
    return pools, tasks, notes


def _find_folder(root: Path, source: TaskSource) -> Path:
    for name in source.folders:
        if (root / name).is_dir():
            return root / name
    raise UserError(
        f"data.path={root}: {source.task.title} is missing; it needs a folder {source.folders[0]} with "
        "train.jsonl or train.jsonl.gz and the other official splits."
    )


Rows = Iterable[tuple[str, int, str, Row]]  # split, index in it, where to look for it, row


def _folder_rows(folder: Path) -> Rows:
    found = []
    for split in SPLITS:
        files = [path for end in ("jsonl", "jsonl.gz") if (path := folder / f"{split}.{end}").is_file()]
        found += [(split, n - 1, f"{path}:{n}", row) for path in files[:1] for n, row in read_rows(path)]
    if not found:
        raise UserError(f"{folder} holds no row; it needs train.jsonl or train.jsonl.gz.")
    return found


def _hub_rows(source: TaskSource) -> Rows:
    splits = load_hub(source.hub, source.hub_config, source.task.title)
    for split in (split for split in SPLITS if split in splits):
        for n, row in enumerate(splits[split]):
            yield split, n, f"{source.hub}/{split}:{n}", row


def _example(source: TaskSource, row: Row, origin: str, where: str, varied: bool, seed: int) -> Example:
    try:
        request, answer = source.convert(row)
        prompt = render(choose(source.wordings, varied, seed, origin), request)
        if not prompt or not answer.strip():
            raise ValueError("empty prompt or answer")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where} is no {source.task.title} row: {type(error).__name__} {error}.") from None
    return Example(prompt, answer.strip(), source.task.name, origin, content=request.text)
