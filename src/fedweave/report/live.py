"""`fedweave watch`: a run in the terminal, while it goes on and afterwards. It only reads the run's files."""

import math
import shutil
import sys
import time
from pathlib import Path

from fedweave.console import duration, printable, table
from fedweave.report.timeline import happened
from fedweave.runs.reading import RunRecord, read_run

_PAUSE = 1.0
_SHOWN_CHANGES = 8
_BLOCKS = "▁▂▃▄▅▆▇█"


def watch(folder: Path, once: bool = False) -> None:
    """Draw until the run has ended. Without a terminal: a new picture only when a round has passed."""
    drawn = ""
    while True:
        run = read_run(folder)
        text = render(run, shutil.get_terminal_size((100, 30)).columns)
        if sys.stdout.isatty():
            print(f"\x1b[H\x1b[J{printable(text)}", flush=True)  # home, then clear what was below
        elif str(run.completed) != drawn or run.state != "running":
            print(text, flush=True)
            drawn = str(run.completed)
        if once or run.state != "running":
            return
        time.sleep(_PAUSE)


def render(run: RunRecord, width: int = 100) -> str:
    """The whole picture as text."""
    rounds = run.config.training.rounds
    left = seconds_left(run)
    head = f"{run.path} · {run.method} · {run.state}"
    clock = f"round {run.completed} of {rounds}" + (f" · {duration(left)} left" if left is not None else "")
    parts = [head + clock.rjust(max(len(clock) + 2, width - len(head))), _bar(run.completed, rounds, width)]
    phase = run.live["phase"] if run.live and run.state == "running" else None
    if phase:
        parts.append(f"now: {phase['label']}, {phase['done']} of {phase['total']}")
    if run.state == "stopped":
        parts.append(f"This run is not going on. Continue it with: {run.resume}")
    for section in (_losses(run), _load(run, width), _changes(run), _end(run)):
        if section:
            parts += ["", section]
    if not run.validations:
        why = "discovery comes first." if run.discovery is None else "no site has measured a loss."
        parts += ["", f"No round has been validated yet: {why}"]
    return "\n".join(parts)


def seconds_left(run: RunRecord) -> float | None:
    """Remaining rounds at the pace of the last five; None unless the run goes on."""
    recent = run.round_seconds[-5:]
    if run.state != "running" or not recent:
        return None
    return sum(recent) / len(recent) * max(0, run.config.training.rounds - run.completed)


def sparkline(values: list[float], longest: int = 24) -> str:
    """Numbers as small blocks, the last ``longest`` of them; those of a run that diverged are none."""
    values = values[-longest:]
    finite = [v for v in values if math.isfinite(v)]
    low, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    return "".join(
        _BLOCKS[round((v - low) / span * (len(_BLOCKS) - 1))] if math.isfinite(v) else "×" for v in values
    )


def _least(values: list[float]) -> float:
    return min((v for v in values if math.isfinite(v)), default=math.nan)


def _bar(done: int, total: int, width: int) -> str:
    inner = max(10, width - 2)
    full = round(inner * done / max(1, total))
    return f"[{'█' * full}{'·' * (inner - full)}]"


def _losses(run: RunRecord) -> str:
    """By task, or by site where every site validates on its own rows."""
    if not run.validations:
        return ""
    curves: dict[str, list[float]] = {}
    for event in run.validations:
        figures = event.get("tasks", {})
        named = {title: figures[task] for task, title in run.titles.items() if task in figures}
        if "sites" in event:
            named = {**event["sites"], "all sites": event["loss"]}
        for name, loss in named.items():
            curves.setdefault(name, []).append(loss)
    if "all sites" in curves:  # below those that joined later, too
        curves["all sites"] = curves.pop("all sites")
    if told := [event["train_loss"] for event in run.rounds if event["train_loss"] is not None]:
        curves["training"] = told
    rows = [
        [name, f"{values[0]:.3f}", f"{_least(values):.3f}", f"{values[-1]:.3f}", sparkline(values)]
        for name, values in curves.items()
    ]
    return table(["validation loss", "first", "best", "now", "rounds"], rows)


def _load(run: RunRecord, width: int) -> str:
    if len(run.expert_load) < 2:
        return ""
    room = max(10, min(50, width - 30))
    lines = [f"  expert {m}  {share:4.0%}  {'█' * round(share * room)}" for m, share in enumerate(run.expert_load)]
    return "\n".join([f"  experts' load, router entropy {run.entropy:.0%} of its largest", *lines])


def _changes(run: RunRecord) -> str:
    lines = [
        (event["round"], f"before round {event['round']}: {line}")
        for event in run.changes
        for line in happened(event)
    ]
    lines += [
        (event["round"], f"round {event['round']}: {who} in quarantine")
        for event in run.rounds
        for who in event.get("quarantined", [])
    ]
    shown = sorted(lines, key=lambda line: line[0])[-_SHOWN_CHANGES:]
    return "\n".join(f"  {text}" for _, text in shown)


def _end(run: RunRecord) -> str:
    if run.best is None or run.state == "running":
        return ""
    best = run.best
    macro = next(reversed(best["loss"][best["used"]]))
    score = f", score {best['score'][macro]:.3f}" if "score" in best else ""
    return f"  test, best round {best['round']}: loss {best['loss'][best['used']][macro]:.3f}{score}"
