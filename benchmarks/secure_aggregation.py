"""What secure aggregation adds to a round: time of every part, bytes, and how far the sum is off.

    python -m benchmarks.secure_aggregation [--sites 20] [--numbers 3000000] [--away 0,2] [key=value …]

One question with real keys: keys, shares, masks, the server's unmasking. The sites' parts run one after the other
here and side by side in a federation, so that a round waits for the slowest site and for the server. ``away`` sites
have dealt shares and do not answer. SmolLM2-135M with four experts and a router has about three million numbers.

Beside it stands a site's own part of a round, measured in the same run: local steps of one client on this machine,
with the model that ``backbone.model=…`` names and the benchmark's ten steps of eight examples.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import keep
from fedweave.config import load_config
from fedweave.console import Console
from fedweave.federation.state import broadcast
from fedweave.methods import build_method
from fedweave.privacy import masking
from fedweave.privacy.masking import Party, decode, encode, unmask
from fedweave.runs.workspace import prepare


def measure(sites: int, numbers: int, away: int) -> dict:
    rng = np.random.default_rng(0)
    spent = {"keys_and_shares": [0.0] * sites, "masks": [0.0] * sites}
    started = time.perf_counter()
    parties = {i: Party(i) for i in range(sites)}
    keys = {i: party.public() for i, party in parties.items()}
    sealed = {}
    for i, party in parties.items():
        clock = time.perf_counter()
        sealed[i] = party.share(keys)
        spent["keys_and_shares"][i] = time.perf_counter() - clock
    alive = list(range(sites - away))
    total, exact = torch.zeros(numbers, dtype=torch.int64), torch.zeros(numbers, dtype=torch.float64)
    for i in alive:
        values = torch.from_numpy(rng.normal(size=numbers))
        clock = time.perf_counter()
        sent = parties[i].hide(encode(values, sites), {v: sealed[v][i] for v in range(sites)})
        spent["masks"][i] = time.perf_counter() - clock
        total, exact = total + sent, exact + values
    gone = list(range(len(alive), sites))
    told = {i: parties[i].tell(alive, gone) for i in alive}
    clock = time.perf_counter()
    found = decode(unmask(total, keys, alive, told))
    server = time.perf_counter() - clock
    return {
        "sites": sites, "away": away, "numbers": numbers,
        "site_keys_and_shares_s": round(max(spent["keys_and_shares"]), 3),
        "site_masks_s": round(max(spent["masks"]), 3),
        "server_s": round(server, 3),
        "a_round_waits_s": round(max(spent["keys_and_shares"]) + max(spent["masks"]) + server, 3),
        "all_in_one_process_s": round(time.perf_counter() - started, 2),
        "bytes_up": 8 * numbers + masking.KEYS + sites * (masking.SEALED + masking.SHARE),
        "bytes_up_plain": 4 * numbers,
        "off_by": float((found - exact).abs().max()),
        "stated": len(alive) * masking.STEP / 2,
    }  # fmt: skip


def round_seconds(overrides: list[str]) -> float:
    """What a site computes in a round, in seconds; the second of two, since the first one also warms up."""
    usual = ["data.clients=1", "discovery.max_buckets=4", "training.local_steps=10", "training.batch_size=8"]
    config = load_config("quickstart", [*usual, "backbone.device=cpu", *overrides])
    engine = prepare(config, Console(quiet=True)).build(Console(quiet=True)).engine
    method = build_method(config)
    state = method.prepare(engine)
    for t in range(2):
        clock = time.perf_counter()
        for _ in engine.ask(method.train, engine.members, broadcast(state, t)):
            pass
        spent = time.perf_counter() - clock
    engine.detach()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--numbers", type=int, default=3_000_000)
    parser.add_argument("--away", default="0,2")
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    found = [measure(args.sites, args.numbers, int(away)) for away in args.away.split(",")]
    if args.overrides:
        spent = round_seconds(args.overrides)
        again = [measure(args.sites, args.numbers, int(away)) for away in args.away.split(",")]
        for one, other in zip(found, again, strict=True):  # before and after: others may use this machine
            waits = (one["a_round_waits_s"] + other["a_round_waits_s"]) / 2
            one |= {"round_s": round(spent, 2), "share_of_it": round(waits / spent, 3)}
    print(json.dumps(found, indent=1))
    keep(found, args.output)


if __name__ == "__main__":
    main()
