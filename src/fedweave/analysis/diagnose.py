"""``fedweave diagnose``: the paper's theory on a run of one's own, as far as it can be measured, as one JSON tree.

Router weights are cheap: what needs only them covers all clients and examples. What needs gradients or losses of
the real model is taken on a sample: some clients, a few fixed batches of each of their buckets. Constants of the
assumptions, which bound all states, cannot be measured at one: docs/diagnostics.md says what is given instead.
"""

import time
from pathlib import Path

from fedweave.analysis.diagnosis import Diagnosis
from fedweave.analysis.measure import (
    measure_budget,
    measure_conflict,
    measure_contamination,
    measure_paths,
    measure_risk,
)
from fedweave.analysis.subject import Sample, open_subject, quick_sample
from fedweave.analysis.verdicts import verdicts
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.json_files import write_json

SCHEMA = 1
NEEDS = {  # labels, a router with several experts
    "conflict": (True, False),
    "contamination": (True, True),
    "effective_budget": (False, True),
    "router_paths": (False, True),
    "routing_risk": (True, True),
}
NEEDS_LABELS = (
    "needs task labels, which this run's data does not have; a 'task' in every JSONL row would give them."
)
NEEDS_ROUTER = "needs several experts and a router; {method} has one adapter for everything."


def diagnose(
    folder: Path,
    console: Console,
    clients: int | None = None,
    batches: int = 1,
    which: str = "best",
    router_rate: float | None = None,
    model: str | None = None,
) -> Diagnosis:
    """Measure everything that the run allows, write diagnostics.json, return it.

    ``which`` is the state to look at: best, last or start; ``router_rate`` the η of the router's paths. Without
    ``clients`` the sample is as large as a minute allows; ``model`` is where the backbone lies, if elsewhere.
    """
    if (clients is not None and clients < 1) or batches < 1:
        raise UserError("--clients and --batches must be at least 1.")
    if router_rate is not None and not 0 < router_rate <= 1000:
        raise UserError("--router-rate must be above 0 and at most 1000.")
    started = time.monotonic()
    subject = open_subject(folder, which, console, model)
    config = subject.workspace.config
    rate = router_rate if router_rate is not None else config.router.lr
    size = config.training.batch_size
    sample = Sample(subject.clients[:clients], batches, size) if clients else quick_sample(subject, batches, size)
    routed = subject.state.router is not None and subject.state.layout.experts > 1
    refused = {}
    for name, (labels, router) in NEEDS.items():
        if router and not routed:
            refused[name] = NEEDS_ROUTER.format(method=config.method)
        elif labels and not subject.labelled:
            refused[name] = NEEDS_LABELS
    if len(refused) == len(NEEDS):
        raise UserError(f"there is nothing to diagnose in {folder}: conflict {refused['conflict']}")
    found: Diagnosis = {
        "schema": SCHEMA,
        "method": config.method,
        "round": subject.round,
        "rounds": subject.completed,
        "patterns": subject.patterns if subject.labelled else [],
        "experts": subject.state.layout.experts,
        "sample": {
            "clients": [c.name for c in sample.clients],
            "of_clients": len(subject.clients),
            "batches": batches,
            "batch_size": sample.batch_size,
        },
        "refused": refused,
        "seconds": 0.0,
        "verdicts": [],
    }
    if "conflict" not in refused:
        found["conflict"] = measure_conflict(subject, sample, console)
    if "contamination" not in refused:
        found["contamination"] = measure_contamination(subject)
    if "effective_budget" not in refused:
        found["effective_budget"] = measure_budget(subject)
    if "router_paths" not in refused:
        found["router_paths"] = measure_paths(subject, sample, rate, console)
    if "routing_risk" not in refused:
        found["routing_risk"] = measure_risk(subject, sample, console)
    found["verdicts"] = verdicts(found)
    found["seconds"] = round(time.monotonic() - started, 1)
    write_json(folder / "diagnostics.json", found)
    return found
