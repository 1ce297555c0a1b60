"""What secure aggregation adds to a round between real processes.

    python -m benchmarks.masked_sites [--sites 20] [--away 2] [--rounds 3] [--output FILE] [key=value …]

A SuperLink with TLS and so many sites with keys of their own, as processes of this machine; the same federation
without masks, with masks, and with masks while ``away`` sites are killed after its first round. Sites compute
next to nothing (a Llama of three layers), so that what a round takes is what Flower and masks take. Since all
sites share this machine's cores, seconds on the clock say little: what counts is the processor time of one site
and of the server. The arithmetic alone, beside a real round, stands in ``benchmarks.secure_aggregation``. Takes
0.7 GB a site; Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.figures import keep
from benchmarks.small import small_model
from fedweave.runs.folder import RunFolder
from fedweave.runs.live import read_live
from tests.federation.flower.processes import SMALL, Deployment
from tests.helpers import events

# Some two million numbers for three experts and the router, about what SmolLM2-135M has
LARGE = ["experts.rank=128", "experts.target_modules=all-linear", "router.hidden=512"]
PLAIN = ["federation.rule=mean", "federation.max_share=1.0"]  # what sums can do
MASKED = ["federation.secure_aggregation=true"]
SERVER = ("superlink", "federation")
PATIENCE = 1800  # seconds


def processor_seconds(made: Deployment) -> dict[str, float]:
    """Of every process that is there."""
    found = {}
    for name, process in made.processes.items():
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except FileNotFoundError:  # it has ended
            continue
        found[name] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # as user and for it in the kernel
    return found


def federation(made: Deployment, name: str, rounds: int, settings: list[str], killed: list[str]) -> dict:
    """What the rounds after the first took; these sites are killed before them."""
    run = made.folder / name
    process = made.federate(
        "federation", "quickstart", *SMALL, *LARGE, f"federation.sites={len(made.sites)}", *settings,
        f"training.rounds={rounds}", f"backbone.model={made.model}", f"evaluation.every={rounds}", f"output={run}",
    )  # fmt: skip
    end, before = time.monotonic() + PATIENCE, None
    after: dict[str, float] = {}
    while process.poll() is None:
        assert time.monotonic() < end, made.log("federation")
        after = processor_seconds(made) or after
        if before is None and events(run, "round"):
            before = after
            for site in killed:
                made.kill(site)
        time.sleep(0.2)
    assert process.returncode == 0, made.log("federation")
    live = read_live(run)
    assert live is not None and before is not None
    own = [after[n] - before[n] for n in made.sites if n in made.processes]
    took = {
        "round_s": live["round_seconds"],
        "site_processor_s": round(statistics.mean(own) / (rounds - 1), 2),
        "server_processor_s": round(sum(after[n] - before[n] for n in SERVER) / (rounds - 1), 2),
    }
    print(f"{name}: {took}", flush=True)
    return took


def tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = RunFolder(run).newest()
    assert newest is not None
    return newest.tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--away", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of every site: threads of twenty processes wait by spinning
    names = tuple(f"site{i:02d}" for i in range(args.sites))
    with tempfile.TemporaryDirectory() as folder:
        made = Deployment(Path(folder), small_model(Path(folder) / "small"), names)
        try:
            made.start(*names)
            plain = federation(made, "plain", args.rounds, [*PLAIN, *args.overrides], [])
            masked = federation(made, "masked", args.rounds, [*MASKED, *args.overrides], [])
            lost = ["federation.deadline=60", "federation.min_answers=3", *args.overrides]
            killed = federation(made, "killed", args.rounds, [*MASKED, *lost], list(names[: args.away]))
        finally:
            made.stop()
        ours, theirs = tensors(made.folder / "masked"), tensors(made.folder / "plain")
        sent = events(made.folder / "masked", "round")[-1]["bytes_up"]
        found = {
            "sites": args.sites, "away": args.away,
            "numbers": sum(ours[name].numel() for name in ("theta", "phi")),
            "plain": plain, "masked": masked, "killed": killed,
            "bytes_up_of_a_site": statistics.median(sent.values()),
            # after all rounds, of which each rounds its sums to 2^-24
            "models_apart": float((ours["theta"] - theirs["theta"]).abs().max()),
            "largest_number": float(theirs["theta"].abs().max()),
        }  # fmt: skip
    print(json.dumps(found, indent=1))
    keep(found, args.output)


if __name__ == "__main__":
    main()
