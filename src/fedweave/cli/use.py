"""Verbs that use a trained model: evaluate, generate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedweave.cli.verbs import Verbs, checkpoint, last, overrides, quiet
from fedweave.console import Console
from fedweave.errors import UserError


def register(verbs: Verbs) -> None:
    evaluate = verbs.add("evaluate", _evaluate, "Test a model, on its own test set or on a JSONL file.")
    evaluate.add_argument("folder", type=Path, help="a run folder, or a bundle with --data")
    overrides(evaluate)
    evaluate.add_argument("--data", type=Path, help="a JSONL file of prompt/response or messages rows")
    last(evaluate)
    checkpoint(evaluate)
    quiet(evaluate)
    generate = verbs.add("generate", _generate, "Answer prompts with a model (from standard input when none).")
    generate.add_argument("folder", type=Path, help="a run folder or a bundle")
    generate.add_argument("prompts", nargs="*", help="prompts; standard input gives one per line")
    generate.add_argument("--routing", choices=["sparse", "soft", "top2", "top3", "top4"], default="sparse")
    generate.add_argument("--max-new-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, help="draw answers at this temperature; greedy without it")
    generate.add_argument("--top-p", type=float, help="with --temperature: nucleus sampling")
    generate.add_argument("--seed", type=int, help="with --temperature: repeat the same draw")
    generate.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this text")
    last(generate)
    checkpoint(generate)


def _evaluate(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.runs.use import evaluate

    where = arguments.folder, arguments.overrides, arguments.data, arguments.last
    print(evaluate(*where, console, arguments.checkpoint))


def _generate(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.inference.sampling import Sampling
    from fedweave.runs.use import load

    prompts = arguments.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts or not all(p.strip() for p in prompts):
        raise UserError("there is no prompt; give one in quotes, or one per line on standard input.")
    for name in ("top_p", "seed"):
        if getattr(arguments, name) is not None and arguments.temperature is None:
            raise UserError(f"--{name.replace('_', '-')} has no effect without --temperature; add --temperature 1.")
    options = {
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": arguments.temperature is not None,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
        "stop_strings": arguments.stop,
    }
    Sampling.of(options)  # complain before the model loads
    model = load(arguments.folder, last=arguments.last, checkpoint=arguments.checkpoint)
    for prompt, answer in zip(prompts, model.generate(prompts, arguments.routing, **options), strict=True):
        bars = "  ".join(f"{m}:{w:.2f}" for m, w in enumerate(answer.weights))
        console.say(f"[{prompt}]  expert {answer.expert}  ({bars})")
        print(answer.text)
