"""Sample data and a site file for every site of a try on one machine: sample_sites.py KEYS SITE...

KEYS is the folder that make-certificates.sh filled. Each site gets its own mixture of the four built-in patterns.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fedweave.data.partition import dirichlet_partition
from fedweave.data.sample import make_sample

SITE = """name: {name}
data: data.jsonl
backbone: {{download: true}}   # the default model is fetched once; without this nothing calls out
superlink:
  address: 127.0.0.1:8000
  root_certificates: ca.crt
  private_key: site.key
  port: {port}
"""


def main(keys: Path, sites: list[str]) -> None:
    pools, _ = make_sample(72, seed=42)
    shares = dirichlet_partition({task: pool[:60] for task, pool in pools.items()}, len(sites), 1.0, seed=42)
    for i, (name, rows) in enumerate(zip(sites, shares, strict=True)):
        write(keys / name / "data.jsonl", rows)
        (keys / name / "site.yaml").write_text(SITE.format(name=name, port=9094 + i))
    write(keys / "server" / "test.jsonl", [e for pool in pools.values() for e in pool[60:]])


def write(path: Path, rows: list) -> None:
    lines = [{"prompt": e.prompt, "response": e.response, "task": e.task} for e in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{path}: {len(lines)} rows")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
