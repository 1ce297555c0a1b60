"""What is sent to upstreams and what their events mean, llama-server's in events as it sent them;
test_llama_server.py has that program itself."""

import httpx
import pytest

from fedweave.errors import UserError
from fedweave.inference.sampling import Sampling
from fedweave.serving.jobs import Job
from fedweave.serving.protocol import ApiError
from fedweave.serving.upstreams import Heard, Llama, Sglang, Vllm
from tests.helpers import PROMPTS

# Of a real answer (" no" and the end of the text), without what is not read.
EVENTS = [
    {"content": " no", "tokens": [20], "stop": False, "tokens_predicted": 1, "completion_probabilities": [
        {"id": 20, "logprob": -1.3, "top_logprobs": [{"id": 20, "logprob": -1.3}, {"id": 21, "logprob": -2.6}]}]},
    {"content": "", "tokens": [22], "stop": False, "tokens_predicted": 2},
    {"content": "", "tokens": [], "stop": True, "tokens_predicted": 3, "stop_type": "eos"},
]  # fmt: skip


def job(twin, passed=None, **options) -> Job:
    prompt = twin.backbone.prompts.encode_prompts(PROMPTS[:1])[0]
    return Job(prompt, Sampling.of({"max_new_tokens": 7, **options}), passed=passed or {}, number=2)


def test_llama_server_is_told_every_option_by_its_own_name(twin):
    llama = Llama(httpx.AsyncClient(), twin)
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 2**32 - 1}
    sent = llama.request(job(twin, repetition_penalty=1.2, logprobs=0, stop_strings=["a"], **drawn), {"lora": []})
    expected = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1, "stop": ["a"]}
    assert {name: sent[name] for name in expected} == expected and sent["repeat_penalty"] == 1.2
    assert (sent["n_predict"], sent["n_probs"], sent["stream"], sent["lora"]) == (7, 1, True, [])
    assert sent["prompt"] == twin.backbone.prompts.encode_prompts(PROMPTS[:1])[0].ids.tolist()
    greedy = llama.request(job(twin), {})
    assert greedy["temperature"] == 0 and not {"seed", "n_probs", "json_schema"} & set(greedy)
    schema = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}}}, "mirostat": 2}
    sent = llama.request(job(twin, schema), {})
    assert sent["json_schema"] == {"enum": [1]} and sent["mirostat"] == 2 and "response_format" not in sent


def test_llama_servers_events_are_text_scores_and_an_end(twin):
    llama, asked = Llama(httpx.AsyncClient(), twin), job(twin, logprobs=1)
    first, second, end = (llama.heard(event, asked) for event in EVENTS)
    assert (first.text, first.tokens, first.reason) == (" no", 1, None)
    assert [(s.token, s.logprob, s.top) for s in first.scores] == [(20, -1.3, {20: -1.3})]
    assert second == Heard(tokens=2) and end == Heard(reason="stop", tokens=2, last=True)
    limit = llama.heard({"content": "x", "stop": True, "tokens_predicted": 7, "stop_type": "limit"}, asked)
    assert (limit.text, limit.reason, limit.tokens, limit.last) == ("x", "length", 7, True)
    ends = job(twin, stop_token_ids=[22])  # a token that the file takes for an ordinary one
    assert llama.heard(EVENTS[1], ends) == Heard(reason="stop", tokens=1, last=True)


def test_an_answer_that_shall_not_end_is_not_ended_here(twin):
    on, ends = job(twin, {"ignore_eos": True}, stop_token_ids=[22]), twin.backbone.end_ids
    assert Vllm(httpx.AsyncClient(), twin).request(on, {})["stop_token_ids"] == [22]
    assert Vllm(httpx.AsyncClient(), twin).request(job(twin), {})["stop_token_ids"] == ends
    event = {"content": "", "tokens": ends[:1], "stop": False, "tokens_predicted": 1}
    assert Llama(httpx.AsyncClient(), twin).heard(event, job(twin)).last
    assert not Llama(httpx.AsyncClient(), twin).heard(event, on).last


def test_vllm_is_asked_for_a_prompts_log_probabilities_and_heard(twin):
    """Its whole answer begins with the prompt as it spells it, and ends with the token that ended it."""
    vllm, asked = Vllm(httpx.AsyncClient(), twin), job(twin, logprobs=0, echo=True)
    sent = vllm.request(asked, {})
    assert sent["echo"] is True and sent["stream"] is False and "stream_options" not in sent
    tokens = [*asked.prompt.ids.tolist(), 20, twin.backbone.end_ids[0]]
    told = {
        "tokens": [f"token_id:{token}" for token in tokens],
        "token_logprobs": [None] + [-1.0] * (len(tokens) - 1),
        "top_logprobs": [None] + [{f"token_id:{token}": -1.0} for token in tokens[1:]],
    }
    choice = {"text": "spelled otherwise", "finish_reason": "stop", "logprobs": told}
    heard = vllm.heard({"choices": [choice], "usage": {"completion_tokens": 2}}, asked)
    assert heard.text == twin.backbone.tokenizer.decode([20]) and heard.reason == "stop"
    assert [score.token for score in heard.scores] == tokens[:-1] and heard.scores[0].logprob is None
    with pytest.raises(ApiError, match="tells no log-probabilities of the prompt"):
        vllm.heard({"choices": [{"text": "x", "logprobs": {k: v[-2:] for k, v in told.items()}}]}, asked)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Llama, {"logprobs": 1, "echo": True}, "echo: llama-server has no"),
        (Sglang, {"logprobs": 1}, "logprobs: not offered before SGLang"),
        (Llama, {"min_new_tokens": 2}, "min_tokens: llama-server"),
    ],
)
def test_what_an_upstream_cannot_do_is_refused(twin, kind, options, message):
    upstream = kind(httpx.AsyncClient(), twin)
    upstream.check(Sampling())
    with pytest.raises(UserError, match=message):
        upstream.check(Sampling.of(options))
