"""Comparisons: grids of runs and their tables."""

from __future__ import annotations

from pathlib import Path

from fedweave.compare.grid import cells, load_comparison, run_grid
from fedweave.compare.tables import Results, as_csv, choose_best, latex, markdown
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.checkpoint import write_atomic
from fedweave.federation.distributed import world


def compare(name: str, overrides: list[str], output: Path, best_of: str | None, console: Console) -> str:
    """Run (or finish) a comparison and write its tables; returns the Markdown."""
    import json

    comparison = load_comparison(name, overrides, best_of)
    grid = cells(comparison, output)
    finished, failures = run_grid(grid, console)
    processes = world()
    if processes is not None and processes.rank > 0:
        return ""  # the first process writes the tables
    for failure in failures:
        console.warn(failure)
    if not finished:
        raise UserError("no cell of the comparison finished.")
    everything = [{"values": cell.values, "summary": summary} for cell, summary in finished]
    text = ""
    if comparison.best_of:
        finished, lines = choose_best(finished, comparison.best_of)
        text = f"{comparison.best_of} chosen by validation loss:\n\n" + "".join(f"- {x}\n" for x in lines) + "\n"
    results = Results.of(finished)
    text += markdown(results)
    write_atomic(output / "table.md", text)
    write_atomic(output / "table.tex", latex(results))
    write_atomic(output / "results.csv", as_csv(results))
    write_atomic(output / "results.json", json.dumps(everything, indent=1))
    if failures:
        console.warn(f"{len(failures)} of {len(grid)} cells failed; run the same command again to retry them.")
    return text
