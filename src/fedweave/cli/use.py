"""Verbs that use a trained model: evaluate, generate."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from fedweave.cli.rows import output, require_target, write_rows
from fedweave.cli.verbs import Verbs, shared
from fedweave.console import Console, show
from fedweave.errors import UserError
from fedweave.schema import Prediction

if TYPE_CHECKING:
    from fedweave.data.examples import Prompt
    from fedweave.data.files import Row


TOLD = ("expert", "adapter", "weights", "doubt", "ended", "truncated")  # of an answer, in a file of answers


def register(verbs: Verbs) -> None:
    evaluate = verbs.add("evaluate", _evaluate, "Test a model, on its own test set or on a file of rows.")
    evaluate.add_argument("folder", type=Path, help="a run folder, or a bundle with --data")
    shared(evaluate, "overrides")
    evaluate.add_argument("--data", type=Path, help="a file of prompt/response or messages rows")
    output(evaluate, "every row with its answer, score, loss and router weights")
    shared(evaluate, "--backbone", "--last", "--checkpoint", "--quiet")
    generate = verbs.add("generate", _generate, "Answer prompts with a model (from standard input when none).")
    generate.add_argument("folder", type=Path, help="a run folder or a bundle")
    generate.add_argument("prompts", nargs="*", help="prompts; standard input gives one per line")
    generate.add_argument(
        "--data", type=Path, help="a file of rows to answer: prompts, with system or not, or chats"
    )
    generate.add_argument("--system", metavar="TEXT", help="a system prompt for rows that have none")
    output(generate, "every row with its answer, expert and router weights")
    generate.add_argument("--routing", choices=["sparse", "soft", "top2", "top3", "top4"], default="sparse")
    generate.add_argument("--max-new-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, help="draw answers at this temperature; greedy without it")
    generate.add_argument("--top-p", type=float, help="with --temperature: nucleus sampling")
    generate.add_argument("--seed", type=int, help="with --temperature: repeat the same draw")
    generate.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this text")
    generate.add_argument("--adapter", metavar="NAME", help="expert_0, …, shared or base answers, not the router's")
    shared(generate, "--backbone", "--doubt", "--last", "--checkpoint")


def _evaluate(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.runs.use import evaluate

    require_target(arguments.output)
    rows: list[Prediction] = []
    where = arguments.folder, arguments.overrides, arguments.data, arguments.last
    show(evaluate(*where, console, arguments.checkpoint, rows, arguments.backbone))
    if arguments.output:
        write_rows(arguments.output, rows)
        console.say(f"{arguments.output}: {len(rows)} rows.")


def _generate(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.inference.sampling import Options, Sampling
    from fedweave.runs.use import load

    for name in ("top_p", "seed"):
        if getattr(arguments, name) is not None and arguments.temperature is None:
            raise UserError(f"--{name.replace('_', '-')} has no effect without --temperature; add --temperature 1.")
    options: Options = {
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": arguments.temperature is not None,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
        "stop_strings": arguments.stop,
    }
    Sampling.of(options)  # complain before the model loads
    require_target(arguments.output)
    rows = _asked(arguments)
    which = {"last": arguments.last, "checkpoint": arguments.checkpoint}
    model = load(arguments.folder, model=arguments.backbone, doubt=arguments.doubt, **which)
    prompts = [prompt for _, prompt in rows]
    bar = console.progress("answers", len(rows), "prompts") if arguments.data else None
    with warnings.catch_warnings(record=True) as remarks:
        answers = model.generate(prompts, arguments.routing, bar, arguments.adapter, **options)
    if bar:
        bar.close()
    for remark in remarks:
        console.warn(str(remark.message))
    if arguments.output:
        said = [
            {**row, "answer": a.text, **{name: getattr(a, name) for name in TOLD}}
            for (row, _), a in zip(rows, answers, strict=True)
        ]
        write_rows(arguments.output, said)
        console.say(f"{arguments.output}: {len(said)} answers.")
        return
    for prompt, answer in zip(prompts, answers, strict=True):
        asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        bars = "  ".join(f"{m}:{w:.2f}" for m, w in enumerate(answer.weights))
        strange = f"  doubt {answer.doubt:.2f}" if answer.doubt is not None else ""
        console.say(f"[{asked}]  {answer.adapter.replace('_', ' ')}  ({bars}){strange}")
        show(answer.text)


def _asked(arguments: argparse.Namespace) -> list[tuple[Row, Prompt]]:
    """What is to be answered: rows as they will be written, and their prompts."""
    from fedweave.data.files import find_path
    from fedweave.data.own import read_prompts
    from fedweave.data.rows import with_system
    from fedweave.runs.use import row_fields

    rows: list[tuple[Row, Prompt]]
    if arguments.data:
        if arguments.prompts:
            raise UserError("prompts stand either in --data or on the command line, not in both.")
        rows = read_prompts(find_path(str(arguments.data), "--data "), row_fields(arguments.folder))
    else:
        lines = arguments.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        if not lines or not all(p.strip() for p in lines):
            raise UserError("there is no prompt; give one in quotes, or one per line on standard input.")
        rows = [({"prompt": p}, p) for p in lines]
    if (system := arguments.system) is None:
        return rows
    if not system.strip():
        raise UserError("--system is empty; leave it out.")
    return [(row, with_system(system, prompt)) for row, prompt in rows]
