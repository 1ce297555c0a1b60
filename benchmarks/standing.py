"""What a server costs while it stands there: ``python -m benchmarks.standing BUNDLE``.

Seconds to load the model and how many of them went into hashing its weights; memory of a server before and after
answers, beside the keys and values that these touched; and how many of many half-open connections are left once its
patience is over.
"""

import argparse
import json
import socket
import sys
import time
from pathlib import Path

import httpx
import psutil

import fedweave
from benchmarks.llama_server import free_port, program
from fedweave.backbone import load as loading
from fedweave.data.sample import make_sample
from fedweave.serving.server import Patience


def loaded(folder: Path, backbone: str | None) -> tuple[dict[str, float], int]:
    """(figures of a load, bytes of keys and values of one token)"""
    hashing: list[float] = []
    real = loading.weights_hash

    def timed(*arguments: object, **options: object) -> str:
        began = time.perf_counter()
        found = real(*arguments, **options)  # type: ignore[arg-type]
        hashing.append(time.perf_counter() - began)
        return found

    loading.weights_hash = timed
    began = time.perf_counter()
    model = fedweave.load(folder, model=backbone, device="cpu")
    figures = {"load_seconds": time.perf_counter() - began, "hash_seconds": sum(hashing), "hashes": len(hashing)}
    loading.weights_hash = real
    config = model.backbone.model.config
    heads = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    return figures, 2 * 4 * config.num_hidden_layers * heads


def served(server: psutil.Process, url: str, token_bytes: int) -> dict[str, float]:
    """Memory in MiB before and after four answers, one after another, so that one row of the cache is touched."""
    prompts = [pool[0].prompt for pool in make_sample(1, seed=3)[0].values()]
    before, touched = server.memory_info().rss, 0
    for prompt in prompts:
        body = {"model": "fedweave", "messages": [{"role": "user", "content": prompt}], "max_tokens": 32}
        usage = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()["usage"]
        touched = max(touched, usage["total_tokens"] * token_bytes)
    after = server.memory_info().rss
    return {
        "started_mib": before / 2**20,
        "more_mib": (after - before) / 2**20,
        "cache_touched_mib": touched / 2**20,
    }


def left_open(address: tuple[str, int], count: int) -> int:
    """Of so many connections that have sent half a request, how many outlast the server's patience."""
    halves = [socket.create_connection(address) for _ in range(count)]
    for half in halves:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    time.sleep(Patience.patience + 5)
    left = 0
    for half in halves:
        half.setblocking(False)
        try:
            left += half.recv(1) != b""
        except BlockingIOError:
            left += 1
        except ConnectionError:
            pass
        half.close()
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a bundle or a run")
    parser.add_argument("--backbone")
    parser.add_argument("--connections", type=int, default=900)
    arguments = parser.parse_args()
    figures, token_bytes = loaded(arguments.folder, arguments.backbone)
    port, where = free_port(), ["--backbone", arguments.backbone] if arguments.backbone else []
    serve = [sys.executable, "-m", "fedweave.cli", "serve", str(arguments.folder), *where, "--device", "cpu"]
    url = f"http://127.0.0.1:{port}"
    with program([*serve, "--port", str(port)], f"{url}/health", threads=2) as server:
        figures |= served(server, url, token_bytes)
        figures["half_open_left"] = left_open(("127.0.0.1", port), arguments.connections)
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
