"""The real llama-server: the files that export writes, alone and behind the gateway. It is looked for at
FEDWEAVE_LLAMA_SERVER and on the PATH."""

import asyncio
import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import httpx
import openai
import pytest
import torch

from fedweave.bundle.programs import write_gguf
from fedweave.data.sample import make_sample
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.inference.model import FedWeaveModel
from fedweave.router.routed import RoutedExperts
from fedweave.serving.gateway import Gateway
from tests.conftest import FAMILIES
from tests.helpers import PROMPTS, command, free_port, random_theta, users_environment, wait_for
from tests.serving.conftest import LIMITS, ask, process, running

PROGRAM = os.environ.get("FEDWEAVE_LLAMA_SERVER") or shutil.which("llama-server")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="llama-server is not installed; FEDWEAVE_LLAMA_SERVER may name it"),
]
DESCRIBED = {"alpha": 8.0, "rank": 4, "base_model": "tiny", "backbone": {"model": "tiny"}}
A_LETTER = 40  # a token of the tiny vocabulary
EVERYTHING = 500  # more tokens than the tiny vocabulary has


@contextmanager
def llama_server(folder, *, adapters: bool = True):
    """The address of a server with what `export --format gguf` wrote, started as its README says."""
    port, (model,) = free_port(), folder.glob("*-*.gguf")
    loras = ",".join(str(path) for path in sorted(folder.glob("*.gguf")) if path != model)
    options = ["--lora", loras, "--lora-init-without-apply"] if adapters and loras else []
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        server = subprocess.Popen(
            [PROGRAM, "-m", str(model), *options, "--port", str(port), "-c", "4096", "-t", "2", "--offline"],
            stdout=log, stderr=log,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert server.poll() is None, (folder.parent / f"{folder.name}.log").read_text()[-2000:]
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_for(ready, "llama-server's start")
        yield url
    finally:
        server.terminate()
        server.wait(60)


def distribution(url: str, ids: list[int], scales: list[float], vocabulary: int) -> torch.Tensor:
    """[V] log-probabilities of the token after ``ids``. It tells them only of tokens that end a character, so that
    it is made to choose one; what it tells is from before that."""
    lora = [{"id": i, "scale": scale} for i, scale in enumerate(scales)]
    body = {"prompt": ids, "lora": lora, "n_predict": 1, "n_probs": vocabulary, "temperature": 0,
            "logit_bias": [[A_LETTER, 1000.0]], "cache_prompt": False}  # fmt: skip
    told = httpx.post(f"{url}/completion", json=body, timeout=120).json()["completion_probabilities"][0]
    assert len(told["top_logprobs"]) == vocabulary
    found = torch.full((vocabulary,), float("nan"))
    for entry in told["top_logprobs"]:
        found[entry["id"]] = entry["logprob"]
    return found


@pytest.fixture(scope="module")
def written(exported, tmp_path_factory):
    from fedweave.runs.use import export_as

    folder = tmp_path_factory.mktemp("llama") / "F32"
    export_as(partial(write_gguf, quantisation="F32"), exported, folder)
    return folder


@pytest.fixture(scope="module")
def upstream(written):
    with llama_server(written) as url:
        yield url


@pytest.fixture(scope="module")
def gateway(model, upstream):
    with running(model, upstream=upstream, kind="llama") as one:
        yield one


# of a mistral with a window of 8 tokens, which llama.cpp does not know, a file takes no more than 8
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("phi3", "smollm3", "mistral")])
def test_logits_of_backbone_and_experts_are_ours(backbone_of, family, tmp_path):
    """Every layer that may carry an expert, and experts that share a part."""
    backbone = backbone_of(family)
    layers = backbone.linear_layers(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    layout = AdapterLayout.of(layers, rank=4, experts=2, shared=4)
    experts = RoutedExperts(layout, None, random_theta(layout, 5, 0.1), None)
    model = FedWeaveModel(backbone, Mixture(layers, layout, alpha=8.0), experts)
    write_gguf(tmp_path / "files", model, DESCRIBED, "F32")
    with llama_server(tmp_path / "files") as url:
        for prompt in PROMPTS:
            ids = backbone.prompts.encode_prompts([prompt])[0].ids.tolist()
            for adapter, scales in (("base", [0, 0]), ("expert_0", [1, 0]), ("expert_1", [0, 1])):
                ours = model.generate([prompt], adapter=adapter, max_new_tokens=1, logprobs=EVERYTHING)[0].scores[0]
                expected = torch.tensor([ours.top[i] for i in range(EVERYTHING)])
                found = distribution(url, ids, scales, EVERYTHING)
                torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_answers_behind_the_gateway_are_those_of_the_model(gateway, twin):
    client = gateway.client()
    for prompt in PROMPTS:
        expected = twin.generate([prompt], max_new_tokens=12, logprobs=2)[0]
        answer = client.chat.completions.create(**ask(prompt, max_tokens=12))
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == expected.ended
        assert answer.fedweave["expert"] == expected.expert
        assert answer.usage.completion_tokens == len(expected.tokens)
        stream = client.chat.completions.create(**ask(prompt, max_tokens=12, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == expected.text
    for name in ("expert_0", "expert_1", "base"):
        expected = twin.generate(PROMPTS[:1], adapter=name, max_new_tokens=12)[0].text
        answer = client.chat.completions.create(**{**ask(PROMPTS[0], max_tokens=12), "model": name})
        assert answer.choices[0].message.content == expected


def test_a_stop_token_that_the_file_does_not_know_ends_the_answer(gateway, twin):
    free = twin.generate(PROMPTS[:1], max_new_tokens=12)[0]
    words = [twin.backbone.tokenizer.decode([token]) for token in free.tokens]
    chosen = next(t for i, t in enumerate(free.tokens) if i > 0 and words[i].isascii() and t not in free.tokens[:i])
    expected = twin.generate(PROMPTS[:1], max_new_tokens=12, stop_token_ids=[chosen])[0]
    answer = gateway.client().chat.completions.create(
        **ask(PROMPTS[0], max_tokens=12, extra_body={"stop_token_ids": [chosen]})
    )
    said = answer.choices[0].message.content.replace("\ufffd", "")  # halves of characters come out otherwise
    assert said == expected.text.replace("\ufffd", "") and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(expected.tokens)


def test_options_and_what_only_llama_server_offers(gateway, twin):
    client, free = gateway.client(), twin.generate(PROMPTS[:1], max_new_tokens=12)[0]
    answer = client.chat.completions.create(**ask(PROMPTS[0], max_tokens=24, stop=free.text[4:6]))
    assert answer.choices[0].message.content == free.text[: free.text.index(free.text[4:6])].strip()
    drawn = ask(PROMPTS[0], max_tokens=12, temperature=1.5, seed=5)
    texts = [client.chat.completions.create(**drawn).choices[0].message.content for _ in range(2)]
    assert texts[0] == texts[1] != free.text
    assert len({c.message.content for c in client.chat.completions.create(**drawn, n=2).choices}) == 2
    told = client.chat.completions.create(**ask(PROMPTS[0], max_tokens=4, logprobs=True, top_logprobs=2))
    scores = twin.generate(PROMPTS[:1], max_new_tokens=4, logprobs=2)[0].scores
    found = told.choices[0].logprobs.content
    assert [e.logprob for e in found] == pytest.approx([s.logprob for s in scores], abs=2e-2)
    assert all(len(e.top_logprobs) == 2 for e in found)
    banned = {"logit_bias": {str(free.tokens[0]): -100}}  # a field that our own server does not offer
    other = client.chat.completions.create(**ask(PROMPTS[0], max_tokens=12), extra_body=banned)
    assert other.choices[0].message.content != free.text
    only = {"grammar": 'root ::= "yes" | "no"'}
    answer = client.chat.completions.create(**ask(PROMPTS[0], max_tokens=12), extra_body=only)
    assert answer.choices[0].message.content in ("yes", "no")
    choice = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    answer = client.chat.completions.create(**ask(PROMPTS[0], max_tokens=12), response_format=choice)
    assert json.loads(answer.choices[0].message.content) in ("yes", "no")
    body = ask(PROMPTS[0], max_tokens=12, response_format={"type": "json_object"})
    assert client.chat.completions.create(**body).choices[0].message.content.startswith("{")
    for field, message in (
        ({"temprature": 1}, "no such field"),
        ({"min_tokens": 3}, "llama-server does not offer it"),
        ({"lora": []}, "no such field"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**ask(PROMPTS[0], max_tokens=12), extra_body=field)


def test_a_server_without_experts_is_found_out(twin, written, tmp_path):
    async def ask_it(url: str) -> tuple[str, str]:
        gateway = Gateway(twin, LIMITS, url, kind="llama")
        try:
            return await gateway.problem(), await gateway.unapplied()
        finally:
            await gateway.stop()

    with llama_server(written, adapters=False) as url:
        problem, _ = asyncio.run(ask_it(url))
        assert "does not serve expert_0; start it with --lora expert_0.gguf" in problem
    silent = replace(twin, experts=replace(twin.experts, theta=torch.zeros_like(twin.theta)))
    write_gguf(tmp_path / "idle", silent, {**DESCRIBED, "rank": twin.mixture.layout.rank}, "F32")
    with llama_server(tmp_path / "idle") as url:
        problem, unapplied = asyncio.run(ask_it(url))
        assert problem == "" and "answers exactly as its bare backbone" in unapplied


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_quantised_backbone_keeps_the_first_tokens_likelihood(exported, twin, tmp_path, kind):
    from fedweave.runs.use import export_as

    export_as(partial(write_gguf, quantisation=kind, expert=0), exported, tmp_path / kind)
    with llama_server(tmp_path / kind) as url:
        for prompt in PROMPTS:
            ids = twin.backbone.prompts.encode_prompts([prompt])[0].ids.tolist()
            ours = twin.generate([prompt], adapter="expert_0", max_new_tokens=1, logprobs=EVERYTHING)[0].scores[0]
            expected = torch.tensor([ours.top[i] for i in range(EVERYTHING)])
            found = distribution(url, ids, [], EVERYTHING)
            assert (found.exp() - expected.exp()).abs().sum() / 2 < {"Q8_0": 0.05, "Q4_1": 0.4}[kind]


def test_the_files_own_template_renders_what_training_rendered(upstream, twin):
    for chat in ([{"role": "user", "content": PROMPTS[1]}],
                 [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3?"},
                  {"role": "assistant", "content": "4"}, {"role": "user", "content": "5?"}]):  # fmt: skip
        rendered = httpx.post(f"{upstream}/apply-template", json={"messages": chat}).json()["prompt"]
        assert rendered == twin.backbone.prompts.render(tuple(chat))[0]
        ids = httpx.post(f"{upstream}/tokenize", json={"content": rendered, "add_special": True}).json()["tokens"]
        assert ids == twin.backbone.prompts.encode_prompts([tuple(chat)])[0].ids.tolist()


def test_the_default_model_answers_as_ours_does(tmp_path):
    """SmolLM2-135M after a short run. llama.cpp keeps keys and values in half precision, which may turn a tie."""
    run, files, environment = tmp_path / "run", tmp_path / "files", users_environment()
    quick = ["evaluation.scores=false", "evaluation.untouched=false", "training.rounds=2", "data.train=24"]
    subprocess.run(command("run", "quickstart", *quick, f"output={run}", "--quiet"), env=environment, check=True)
    export = command("export", run, files, "--format", "gguf", "--quantise", "F32")
    subprocess.run(export, env=environment, check=True)
    pools, _ = make_sample(3, seed=5)
    asked = [example.prompt for pool in pools.values() for example in pool]
    with process(run, environment) as (url, _):
        ours = answers(url, asked)
    with (
        llama_server(files) as upstream,
        process(run, environment, "--upstream", upstream, "--upstream-kind", "llama") as (url, _),
    ):
        theirs = answers(url, asked)
    assert [expert for _, expert in theirs] == [expert for _, expert in ours]
    assert len({expert for _, expert in ours}) > 1
    assert sum(mine == other for mine, other in zip(ours, theirs, strict=True)) >= len(asked) - 2


def answers(url: str, asked: list[str]) -> list[tuple[str, int]]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    replies = [client.chat.completions.create(**ask(prompt, max_tokens=24)) for prompt in asked]
    return [(reply.choices[0].message.content, reply.fedweave["expert"]) for reply in replies]
