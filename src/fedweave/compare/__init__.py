"""Comparisons: grids of runs and their tables."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fedweave.compare.against import attack_table, private_table
from fedweave.compare.bar import bar_table
from fedweave.compare.grid import Cell, Comparison, cells, load_comparison
from fedweave.compare.life import life_courses, life_table
from fedweave.compare.ours import ours_table
from fedweave.compare.record import Record, rounded
from fedweave.compare.runner import Outcome, Runner, faults
from fedweave.compare.tables import Results, as_csv, choose_best, latex, markdown
from fedweave.config import BackboneConfig
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.engines.distributed import world
from fedweave.files import write_atomic
from fedweave.schema import ComparedCell, Summary


def compare(
    names: Sequence[str],
    overrides: list[str],
    outputs: Sequence[Path],
    best_of: str | None,
    console: Console,
    minutes: float | None = None,
    record: Path | None = None,
) -> str:
    """Run (or finish) comparisons, each into its own folder; returns their tables as Markdown. ``record`` is a file
    that gets every finished cell in short; what stands in it is finished."""
    processes = world()
    if minutes is not None and not minutes >= 0:
        raise UserError(f"--minutes must be at least 0, not {minutes:g}.")
    for folder in outputs:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--output {folder} is a file; name a folder.")
    kept = None if record is None else Record(record)  # a file that is something else shows before anything runs
    comparisons = {name: load_comparison(name, overrides, best_of) for name in names}
    folders = dict(zip(names, outputs, strict=True))
    grids = {name: cells(comparison, folders[name]) for name, comparison in comparisons.items()}
    try:
        outcomes = Runner(grids, console, minutes, kept).run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on with the cells that are left") from None
    left = sum(len(outcome.left) for outcome in outcomes.values())
    texts, why = [], []
    if first := processes is None or processes.rank == 0:  # the first process writes the tables
        texts = [_write(comparisons[name], outcomes[name], folders[name], console) for name in names]
        why = faults(outcomes.values())
    taken = sum(len(outcome.taken) for outcome in outcomes.values())
    nothing = first and not any(texts) and not taken
    for fault in why[nothing:]:  # the first is said at the end, where there is nothing else to say
        console.warn(fault)
    if why and not nothing:
        failed = sum(len(outcome.failed) for outcome in outcomes.values())
        console.warn(f"{failed} cells failed; run the same command again to retry them.")
    if taken:
        console.warn(f"other processes have {taken} cells; the tables are whole when the last one has ended.")
    if left:
        console.warn(f"{minutes:g} minutes are up with {left} cells to go; the same command goes on with them.")
    if nothing:
        raise UserError(f"no cell of the comparison finished{f': {why[0]}' if why else '.'}")
    return "\n".join(
        f"## {name}\n\n{text}" if len(names) > 1 else text for name, text in zip(names, texts, strict=False)
    )


def _parts(finished: list[tuple[Cell, Summary]], axis: str | None) -> dict[str, Results]:
    """The results of every value of an axis; of everything, under no name, without one."""
    if axis is None:
        return {"": Results.of(finished)}
    values = dict.fromkeys(str(cell.values[axis]) for cell, _ in finished)
    return {v: Results.of([one for one in finished if str(one[0].values[axis]) == v]) for v in values}


def _ambiguous(finished: list[tuple[Cell, Summary]]) -> list[str]:
    """Backbones that are not the same in all cells, although they are called so."""
    weights: dict[BackboneConfig, set[str]] = {}
    for cell, summary in finished:
        if (found := summary.get("backbone")) and found["fingerprint"]:  # older records do not say
            weights.setdefault(cell.config.backbone, set()).add(found["fingerprint"])
    return [backbone.model for backbone, found in weights.items() if len(found) > 1]


def _write(comparison: Comparison, outcome: Outcome, output: Path, console: Console) -> str:
    """The tables of what has finished; returns the Markdown."""
    if not outcome.finished:
        return ""
    for model in _ambiguous(outcome.finished):
        console.warn(f"cells have different weights under the name {model}: the record's are of another model.")
    # as the record has them: its tables are the same
    finished = ended = [(cell, rounded(summary)) for cell, summary in outcome.finished]
    text = ""
    everything: list[ComparedCell] = [
        {"values": cell.values, "folder": os.path.relpath(folder, output) if folder else None, "summary": summary}
        for (cell, summary), folder in zip(finished, outcome.folders, strict=True)
    ]
    if comparison.best_of:
        finished, lines = choose_best(finished, comparison.best_of, comparison.tables)
        for_all = f", one for every {comparison.tables}" if comparison.tables else ""
        text = (
            f"{comparison.best_of} chosen by validation loss{for_all}:\n\n"
            + "".join(f"- {x}\n" for x in lines)
            + "\n"
        )
    parts = _parts(finished, comparison.tables)
    text += "\n".join(f"### {name}\n\n{markdown(part)}" if name else markdown(part) for name, part in parts.items())
    left = [*outcome.left, *outcome.taken, *outcome.failed]
    against, attacks = ours_table(finished, comparison.ours), attack_table(ended, left)
    for more in (against, life_table(ended), bar_table(ended), attacks, private_table(ended)):
        text += f"\n{more}" if more else ""
    if left:
        text += f"\nNote: {len(left)} of the comparison's {len(ended) + len(left)} cells are not in these tables.\n"
    output.mkdir(parents=True, exist_ok=True)  # all of its cells may stand elsewhere
    if courses := life_courses(ended):
        write_atomic(output / "course.json", json.dumps(courses, indent=1))
    write_atomic(output / "table.md", text)
    write_atomic(output / "table.tex", "\n".join(latex(part) for part in parts.values()))
    write_atomic(output / "results.csv", as_csv(Results.of(finished)))
    write_atomic(output / "results.json", json.dumps(everything, indent=1))
    return text
