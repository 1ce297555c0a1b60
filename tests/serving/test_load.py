"""64 streaming clients at once: nobody is dropped, nobody gets another's answer, and memory stays where it was."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import openai
import psutil
import pytest

from fedweave.data.sample import make_sample
from fedweave.inference.sampling import Sampling
from fedweave.serving.jobs import Job
from fedweave.serving.local import LocalBackend
from fedweave.serving.protocol import ApiError
from tests.helpers import command, users_environment
from tests.serving.conftest import LIMITS, ask, process

CLIENTS = 64


def prompts() -> list[str]:
    pools, _ = make_sample(CLIENTS // 4, seed=5)
    return [example.prompt for pool in pools.values() for example in pool]


async def wave(url: str, asked: list[str], tokens: int) -> list[tuple[str, int]]:
    """Everyone asks at the same moment; (text, expert) of each."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=1200)

    async def one(prompt: str) -> tuple[str, int]:
        stream = await client.chat.completions.create(**ask(prompt, max_tokens=tokens, stream=True))
        text, expert, reason = "", -1, None
        async for chunk in stream:
            expert = getattr(chunk, "fedweave", {"expert": expert})["expert"]
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        assert reason in ("stop", "length")
        return text, expert

    async with client:
        return await asyncio.gather(*(one(prompt) for prompt in asked))


def check(
    url: str, server: psutil.Process, expected: list[tuple[str, int]], tokens: int, waves: int
) -> list[float]:
    """Waves of clients; the server's memory in MiB after each."""
    memory = []
    for _ in range(waves):
        assert asyncio.run(wave(url, prompts(), tokens)) == expected
        memory.append(server.memory_info().rss / 2**20)
    return memory


def test_a_tiny_model(served, twin):
    answers = twin.generate(prompts(), max_new_tokens=8)
    assert len({a.text for a in answers}) > 8 and len({a.expert for a in answers}) > 1
    memory = check(*served, [(a.text, a.expert) for a in answers], 8, waves=3)
    assert memory[2] - memory[0] < 10


@pytest.mark.slow
def test_the_default_model(tmp_path):
    """SmolLM2-135M on a CPU, trained for a few rounds; what it says is asked for directly first."""
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    quick = ["evaluation.scores=false", "evaluation.untouched=false", "training.rounds=1", "data.train=24"]
    environment = users_environment()
    subprocess.run(command("run", "quickstart", *quick, f"output={run}"), env=environment, check=True)
    subprocess.run(command("export", run, bundle), env=environment, check=True)
    script = (
        "import json, sys; import fedweave; model = fedweave.load(sys.argv[1]);"
        "print(json.dumps([(a.text, a.expert) for a in model.generate(json.load(sys.stdin), max_new_tokens=24)]))"
    )
    direct = subprocess.run(
        [sys.executable, "-c", script, str(bundle)],
        input=json.dumps(prompts()), env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    expected = [(text, expert) for text, expert in json.loads(direct.stdout)]
    assert len({text for text, _ in expected}) > CLIENTS / 4
    with process(bundle, environment) as (url, server):
        memory = check(url, server, expected, 24, waves=3)
    print("memory after each wave, MiB:", [round(m) for m in memory])
    assert memory[2] - memory[0] < 0.02 * memory[0]


def test_who_has_hung_up_keeps_nobody_out_of_the_queue(model):
    """While all rows are taken nobody leaves the queue by itself."""
    backend = LocalBackend(model, replace(LIMITS, max_queue=2))  # its thread rests: nothing is answered
    job = Job(model.backbone.prompts.encode_prompts(["How many?"])[0], Sampling())

    async def come_and_go() -> None:
        gone = backend.submit([job, job])
        with pytest.raises(ApiError, match="the queue is full"):
            backend.submit([job])
        for answering in gone:
            answering.cancel()
        backend.submit([job, job])

    asyncio.run(come_and_go())
    assert backend.waiting == 2
