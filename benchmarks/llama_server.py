"""One sequence on a CPU: our own server against llama-server behind our router.

    python -m benchmarks.llama_server BUNDLE --quantise Q8_0 --tokens 96 --output llama-server.json

The bundle is exported as GGUF files, and three programs start: `fedweave serve`, llama-server (at
FEDWEAVE_LLAMA_SERVER or on the PATH) and `fedweave serve --upstream` before it. The same new prompts of the
built-in sample go to both addresses, one at a time and in turns, so that a slow second hits both alike. Time is a
client's. Two figures tell what it is made of: from the request to the first text, in which the router reads the
prompt and the expert reads it again, and tokens a second from there on, which is decoding a sequence. The ratio
over all of it lies between: near the second for long answers (`backbone.end_of_answer=false` lets them go on to the
limit), near the first for short ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from benchmarks.figures import keep
from fedweave.bundle.card import base_model
from fedweave.bundle.load import verify_bundle
from fedweave.bundle.programs import write_gguf
from fedweave.data.sample import make_sample
from fedweave.runs.summary import environment
from fedweave.runs.use import export_as


@dataclass
class Answered:
    text: str
    tokens: int
    first: float  # seconds to the first text
    seconds: float  # to the last
    processor: float  # seconds of all programs behind the address


@contextmanager
def program(command: list[str], ready: str, threads: int) -> Iterator[psutil.Process]:
    """A server, from when ``ready`` answers to the end."""
    run = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
    )  # fmt: skip
    try:
        while run.poll() is None:
            try:
                if httpx.get(ready).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        else:
            raise SystemExit(f"{' '.join(command)} ended with {run.returncode}")
        yield psutil.Process(run.pid)
    finally:
        run.terminate()
        run.wait(60)


def ask(url: str, programs: list[psutil.Process], prompt: str, tokens: int) -> Answered:
    body = {"model": "fedweave", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, count, first = "", 0, 0.0
    before, began = _processor(programs), time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
        for line in response.raise_for_status().iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if piece and not text:
                first = time.perf_counter() - began
            text, count = text + piece, (chunk.get("usage") or {}).get("completion_tokens", count)
    seconds, spent = time.perf_counter() - began, _processor(programs) - before
    return Answered(text, count, first, seconds, spent)


def _processor(programs: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in programs)


def summary(name: str, answers: list[Answered]) -> dict[str, Any]:
    return {
        "server": name,
        "tokens": sum(a.tokens for a in answers),
        "tokens_per_second": round(statistics.median(a.tokens / a.seconds for a in answers), 1),
        "first_text_seconds": round(statistics.median(a.first for a in answers), 3),
        "decoding_tokens_per_second": round(
            statistics.median((a.tokens - 1) / (a.seconds - a.first) for a in answers if a.tokens > 1), 1
        ),
        "tokens_per_processor_second": round(statistics.median(a.tokens / a.processor for a in answers), 1),
        "seconds_per_answer": round(statistics.median(a.seconds for a in answers), 3),
    }


def common(one: str, other: str) -> float:
    """The share of the longer text up to which both are the same."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same / max(len(one), len(other), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Our server and llama-server behind our router, one sequence.")
    parser.add_argument("folder", type=Path, help="a bundle")
    parser.add_argument("--backbone")
    parser.add_argument("--quantise", default="Q8_0")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--each", type=int, default=3, help="prompts of each pattern")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    llama = os.environ.get("FEDWEAVE_LLAMA_SERVER") or shutil.which("llama-server")
    if not llama:
        raise SystemExit("llama-server is not on the PATH; FEDWEAVE_LLAMA_SERVER may name it")
    pools, _ = make_sample(arguments.each, seed=977)
    prompts = [row.prompt for group in zip(*pools.values(), strict=True) for row in group]
    ports = [free_port() for _ in range(3)]
    own, upstream, gateway = (f"http://127.0.0.1:{port}" for port in ports)
    where = ["--backbone", arguments.backbone] if arguments.backbone else []
    serve = [
        sys.executable,
        "-m",
        "fedweave.cli",
        "serve",
        str(arguments.folder),
        *where,
        "--device",
        "cpu",
        "--port",
    ]
    with ExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "files"
        export_as(
            partial(write_gguf, quantisation=arguments.quantise), arguments.folder, files, model=arguments.backbone
        )
        loras = ",".join(str(path) for path in sorted(files.glob("*.gguf")) if "-" not in path.name)
        base = str(files / f"base-{arguments.quantise}.gguf")
        command = [llama, "-m", base, "--lora", loras, "--lora-init-without-apply", "--port", str(ports[1])]
        command += ["-t", str(arguments.threads), "-c", "4096", "--offline"]

        def start(command: list[str], ready: str) -> psutil.Process:
            return stack.enter_context(program(command, ready, arguments.threads))

        ours = [start([*serve, str(ports[0])], f"{own}/health")]
        theirs = [start(command, f"{upstream}/health")]
        options = ["--upstream", upstream, "--upstream-kind", "llama"]
        theirs.append(start([*serve, str(ports[2]), *options], f"{gateway}/health"))
        answers: dict[str, list[Answered]] = {"own": [], "llama-server": []}
        for i, prompt in enumerate([prompts[0], *prompts]):  # the first is asked to warm up
            for name, url, programs in (("own", own, ours), ("llama-server", gateway, theirs)):
                said = ask(url, programs, prompt, arguments.tokens)
                if i:
                    answers[name].append(said)
    results = [summary(name, said) for name, said in answers.items()]
    texts = [(a.text, b.text) for a, b in zip(*answers.values(), strict=True)]
    report = {
        "benchmark": "llama_server",
        "model": base_model(verify_bundle(arguments.folder)),
        "quantise": arguments.quantise,
        "threads": arguments.threads,
        "results": results,
        "times_faster": _ratio(results, "tokens_per_second"),
        "times_faster_decoding": _ratio(results, "decoding_tokens_per_second"),
        "times_sooner_first_text": round(1 / _ratio(results, "first_text_seconds"), 2),
        "same_answers": f"{sum(a == b for a, b in texts)} of {len(texts)}",
        "same_up_to": round(statistics.mean(common(a, b) for a, b in texts), 3),
        "environment": environment(torch.device("cpu")),
    }
    told = ("times_faster", "times_faster_decoding", "times_sooner_first_text", "same_answers", "same_up_to")
    for line in (*results, {name: report[name] for name in told}):
        print(json.dumps(line))
    keep(report, arguments.output)


def _ratio(results: list[dict[str, Any]], name: str) -> float:
    """llama-server behind the router over our own server."""
    return round(results[1][name] / results[0][name], 2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
