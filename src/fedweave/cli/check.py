"""The verb that looks at own data before a run: check."""

import argparse
import json
import re
import shlex
from dataclasses import replace

from fedweave.cli.verbs import Verbs, with_environment
from fedweave.config import Config, load_config
from fedweave.console import Console, show, table
from fedweave.data.check import Characters, Check, ClientCheck, Reader, check_own
from fedweave.errors import UserError

SHOWN = 20  # clients in the table
ALIKE = 3  # faults of one kind that are named
EXAMPLE = 1500  # characters of the example


def register(verbs: Verbs) -> None:
    check = verbs.add("check", _check, "Look at own data before a run: fedweave check my_clients own")
    check.add_argument("data", help="a folder with a file for each client, one file, or hf://owner/name")
    check.add_argument(
        "overrides",
        nargs="*",
        metavar="RECIPE key=value",
        help="the run to come; with a recipe its model counts the tokens, and needs to be on this machine",
    )
    check.add_argument("--json", action="store_true", help="print JSON, with every fault and every client")


def _check(arguments: argparse.Namespace, console: Console) -> int:
    recipes = [item for item in arguments.overrides if "=" not in item]
    settings = with_environment([item for item in arguments.overrides if "=" in item])
    if len(recipes) > 1:
        raise UserError(f"one recipe at a time, not {' and '.join(recipes)}.")
    config = load_config(recipes[0] if recipes else "own", settings)
    config = replace(config, data=replace(config.data, source="jsonl", path=arguments.data))
    reader, remark = _reader(config, bool(recipes) or any(s.startswith("backbone.model=") for s in settings))
    check = check_own(config, reader)
    check.remarks += remark
    if arguments.json:
        print(json.dumps(check.as_dict(), indent=1))
    else:
        show(_text(check))
        show(_verdict(check, recipes[0] if recipes else "own", arguments))
    return 0 if check.passes else 1


def _reader(config: Config, named: bool) -> tuple[Reader, list[str]]:
    """The model's tokenizer where a model was named and lies here; else texts are counted in characters."""
    if not named:
        return Characters(), []
    from fedweave.backbone.lengths import Tokens
    from fedweave.backbone.load import load_prompts

    try:
        return Tokens(load_prompts(config.backbone)), []
    except UserError as error:
        return Characters(), [f"lengths are in characters, since there is no model: {error}"]


def _verdict(check: Check, recipe: str, arguments: argparse.Namespace) -> str:
    if not check.passes:
        return f"\nA run would refuse this data: {_count(len(check.faults), 'fault')}; --json lists them all."
    typed = [item for item in arguments.overrides if "=" in item]
    source = [] if recipe == "own" else ["data.source=jsonl"]
    command = shlex.join(["fedweave", "run", recipe, *source, f"data.path={arguments.data}", *typed])
    return f"\nA run would take this data:\n  {command}"


# ---------------------------------------------------------------------------------- the page


def _text(check: Check) -> str:
    rows = sum(one.rows for one in [*check.clients.values(), *check.held.values()])
    sets = ", ".join(f"{name} {count:,}" for name, count in check.sets.items())
    head = f"{check.data}: {_count(check.count, 'client')}, {_count(rows, 'row')}{sets and f' ({sets})'}"
    parts = [head]
    if check.clients:
        parts.append(_table(check))
    if check.example:
        parts.append(f"One example, {check.example['origin']}:\n{_quoted(check.example['text'])}")
    if check.remarks:
        parts.append("Remarks:\n" + "\n".join(f"  - {remark}" for remark in check.remarks))
    if check.faults:
        parts.append("Faults:\n" + "\n".join(f"  - {line}" for line in _faults(check)))
    return "\n\n".join(parts)


def _table(check: Check) -> str:
    clients = list(check.clients.items())
    lines = [_line(name, one) for name, one in clients[:SHOWN]]
    if len(clients) > SHOWN:
        lines.append([f"… {len(clients) - SHOWN} more", *[""] * 5])
    lines += [_line(f"{name}, for all", one) for name, one in check.held.items()]
    unit = check.unit
    return table(["client", "rows", "train", f"prompt {unit}", f"answer {unit}", "scripts"], lines)


def _line(name: str, one: ClientCheck) -> list[str]:
    spread = [f"{x['median']:,} … {x['max']:,}" for x in (one.prompt, one.answer)]
    shares = [f"{script} {share:.0%}" for script, share in list(one.scripts.items())[:3] if share >= 0.005]
    return [name, f"{one.rows:,}", f"{one.train:,}" if one.train else "", *spread, ", ".join(shares)]


def _quoted(text: str) -> str:
    if len(text) > EXAMPLE:
        text = f"{text[: EXAMPLE // 2]}\n…\n{text[-EXAMPLE // 2 :]}"
    return "\n".join(f"  | {line}" for line in text.splitlines())


def _faults(check: Check) -> list[str]:
    """Every kind of fault once, with the rows that have it."""
    kinds: dict[str, list[dict[str, str]]] = {}
    for fault in check.faults:
        kinds.setdefault(re.sub(r"'[^']*'|\d+|\(.*\)", "·", fault["what"]), []).append(fault)
    lines = []
    for faults in kinds.values():
        first, others = faults[0], faults[1:]
        line = f"{first['where']}: {first['what']}" if first["where"] else first["what"]
        if others:
            places = ", ".join(fault["where"] for fault in others[:ALIKE] if fault["where"])
            line += (
                f" {len(others):,} more like it{places and f': {places}'}{', …' if len(others) > ALIKE else '.'}"
            )
        lines.append(line)
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
