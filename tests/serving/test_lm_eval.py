"""The real lm-eval against the server: log-likelihoods and generation, with the tasks of examples/lm-eval."""

import os
import shutil
import subprocess

import pytest
import torch

from fedweave.evaluation.losses import serving_weights
from tests.helpers import ROOT, read_jsonl
from tests.serving.conftest import running

PROGRAM = shutil.which("lm_eval")
TASKS = ROOT / "examples" / "lm-eval"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="lm_eval is not installed (pip install 'lm_eval[api]')"),
]


def evaluated(task: str, model: str, arguments: str, folder, *options: str) -> list[dict]:
    """What lm-eval noted of every row."""
    command = [PROGRAM, "run", "--model", model, "--model_args", arguments, "--include_path", ".", "--tasks", task]
    done = subprocess.run(
        [*command, "--log_samples", "--output_path", str(folder), *options],
        cwd=TASKS, env={**os.environ, "HF_HOME": str(folder)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (samples,) = folder.rglob(f"samples_{task}_*.jsonl")
    return read_jsonl(samples)


@torch.no_grad()
def log_likelihoods(model, ids: list[int]) -> torch.Tensor:
    """Of every token but the first, [n - 1], by expert 1."""
    tokens, gates = torch.tensor([ids]), model.experts.only("expert_1")[1]
    weights = serving_weights(model.mixture.layout, model.theta, model.backbone.dtype)
    with model.backbone.decoding() as plain, model.mixture.active(weights, gates[None, None]):
        return plain(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


@pytest.fixture(params=["server", "gateway"])
def address(request, served, model):
    """Our own server, and a gateway before it."""
    if request.param == "server":
        yield served[0]
    else:
        with running(model, upstream=served[0]) as gateway:
            yield gateway.url


@pytest.mark.parametrize("more", ["", ",num_concurrent=4,tokenized_requests=False"])
def test_log_likelihoods_are_the_models_own(address, twin, exported, tmp_path, more):
    where = f"model=expert_1,base_url={address}/v1/completions,tokenizer={exported}"
    rows = evaluated("pick", "local-completions", where + more, tmp_path)
    assert len(rows) == len(read_jsonl(TASKS / "pick.jsonl"))
    tokenizer = twin.backbone.tokenizer
    for row in rows:
        context = tokenizer(f"{row['doc']['prompt']}\n\nResponse:")["input_ids"]
        for choice, ((told, _),) in zip(row["doc"]["choices"], row["resps"], strict=True):
            whole = tokenizer(f"{row['doc']['prompt']}\n\nResponse: {choice}")["input_ids"]
            assert whole[: len(context)] == context
            answer = log_likelihoods(twin, whole)[len(context) - 1 :]
            assert float(told) == pytest.approx(answer.sum().item(), abs=1e-2)


def test_generated_answers_are_the_models_own(address, twin, tmp_path):
    where = f"model=fedweave,base_url={address}/v1/chat/completions"
    rows = evaluated("hats", "local-chat-completions", where, tmp_path, "--apply_chat_template")
    prompts = [row["doc"]["prompt"] for row in rows]
    assert len(prompts) == len(read_jsonl(TASKS / "hats.jsonl"))
    expected = [answer.text for answer in twin.generate(prompts, max_new_tokens=32)]
    assert [row["resps"][0][0] for row in rows] == expected
