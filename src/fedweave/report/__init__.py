"""Runs for people: one self-contained page, its pictures as files, and a live view in the terminal."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import fedweave
from fedweave.errors import UserError, needed
from fedweave.report.groups import find_runs, group_runs

REFRESH = 5  # seconds between two looks at a run that goes on


def write_report(paths: Sequence[Path], output: Path | None = None) -> tuple[Path, bool]:
    """Write the page and its figures; returns the page and whether some run is still going on.

    One folder gets its report inside, as report.html and figures/; several need an output. Figures become files
    once all runs have ended."""
    for package in ("jinja2", "matplotlib"):
        needed(package, "reports need matplotlib and jinja2: pip install 'fedweave[report]'.")
    from jinja2 import Environment

    from fedweave.files import write_atomic
    from fedweave.report.sections import all_sections, cards, lead_run

    if output is None and len(paths) > 1:
        raise UserError("several runs need a place for their report: add --output report.html.")
    page = output or paths[0] / "report.html"
    if page.suffix != ".html":
        raise UserError(f"--output {page} must end in .html.")
    runs = find_runs(paths)
    groups = group_runs(runs)
    sections, lead = all_sections(groups), lead_run(groups)
    states = {run.state for run in runs}
    running = "running" in states
    words = [
        lead.config.backbone.model,
        f"{lead.config.data.source} data",
        f"{len(runs)} run{'s' * (len(runs) > 1)}",
    ]
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        files("fedweave.report").joinpath("page.html").read_text(encoding="utf-8")
    )
    name = lead.name if len(runs) == 1 else (paths[0].name if len(paths) == 1 else f"{len(groups)} experiments")
    text = template.render(
        title=f"FedWeave · {name}",
        lead=" · ".join([lead.method if len(groups) == 1 else f"{len(groups)} experiments", *words]),
        state="running" if running else "stopped" if "stopped" in states else "finished",
        refresh=REFRESH if running else None,
        cards=cards(groups),
        sections=sections,
        version=fedweave.__version__,
        source=", ".join(str(p) for p in paths),
    )
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        folder = page.parent / ("figures" if output is None else f"{page.stem}-figures")
        if not running:  # files can wait; a page that refreshes itself must be quick
            folder.mkdir(exist_ok=True)
            for section in sections:
                for picture in section.pictures:
                    picture.save(folder)
    except OSError as error:
        raise UserError(f"the report {page} cannot be written: {error.strerror}.") from None
    write_atomic(page, text)
    return page, running
