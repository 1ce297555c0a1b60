"""The gateway before a real upstream: our own server in another process, its experts chosen by name; and before
upstreams that misbehave."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import openai
import pytest

from fedweave.serving.gateway import Gateway
from tests.helpers import PROMPTS, wait_for
from tests.serving.conftest import LIMITS, ask, running


@pytest.fixture(scope="module")
def upstream(served):
    return served[0]


@pytest.fixture(scope="module")
def gateway(model, upstream):
    with running(model, upstream=upstream) as one:
        yield one


def test_answers_are_those_of_the_model(gateway, twin):
    for prompt in PROMPTS:
        expected = twin.generate([prompt], max_new_tokens=12)[0]
        answer = gateway.client().chat.completions.create(**ask(prompt, max_tokens=12))
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == expected.ended
        assert answer.fedweave["expert"] == expected.expert
        assert answer.fedweave["weights"] == pytest.approx(expected.weights, abs=1e-4)
        assert answer.usage.completion_tokens > 0
    forced = gateway.client().chat.completions.create(**{**ask(PROMPTS[0], max_tokens=12), "model": "expert_1"})
    assert (forced.fedweave["expert"], forced.fedweave["weights"]) == (1, None)


def test_streams_pass_through_piece_by_piece(gateway, twin):
    expected = twin.generate(PROMPTS[1:2], max_new_tokens=24)[0]
    stream = gateway.client().chat.completions.create(**ask(PROMPTS[1], max_tokens=24, stream=True))
    pieces = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert "".join(pieces) == expected.text and sum(map(bool, pieces)) > 3


def test_options_reach_the_upstream(gateway, twin):
    free = twin.generate(PROMPTS[:1], max_new_tokens=24)[0].text
    answer = gateway.client().chat.completions.create(**ask(PROMPTS[0], max_tokens=24, stop=free[4:6]))
    assert answer.choices[0].message.content == free[: free.index(free[4:6])].strip()
    drawn = ask(PROMPTS[0], max_tokens=12, temperature=1.5, seed=5)
    texts = {gateway.client().chat.completions.create(**drawn).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1 and texts != {twin.generate(PROMPTS[:1], max_new_tokens=12)[0].text}


def test_log_probabilities_come_through(gateway, twin):
    expected = twin.generate(PROMPTS[:1], max_new_tokens=6, logprobs=2)[0]
    for stream in (False, True):
        body = ask(PROMPTS[0], max_tokens=6, logprobs=True, top_logprobs=2, stream=stream)
        answer = gateway.client().chat.completions.create(**body)
        choices = [c.choices[0] for c in answer if c.choices] if stream else answer.choices
        told = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert [e.logprob for e in told] == pytest.approx([score.logprob for score in expected.scores], abs=1e-4)
        assert [t.token for t in told] == [twin.backbone.tokenizer.decode([i]) for i in expected.tokens]


def test_the_prompts_own_log_probabilities_come_through(gateway, upstream):
    """As lm-eval asks for them; the upstream itself is the measure."""
    direct = openai.OpenAI(base_url=f"{upstream}/v1", api_key="none", timeout=120)
    free = direct.completions.create(model="base", prompt=PROMPTS[0], max_tokens=6).choices[0].text
    for more in ({}, {"stop": free[2:4]}, {"n": 2}):
        asked = {"model": "fedweave", "prompt": PROMPTS[:2], "max_tokens": 6, "logprobs": 2, "echo": True, **more}
        ours, theirs = (client.completions.create(**asked) for client in (gateway.client(), direct))
        for mine, other in zip(ours.choices, theirs.choices, strict=True):
            assert mine.text == other.text and mine.finish_reason == other.finish_reason
            assert mine.logprobs.tokens == other.logprobs.tokens and mine.logprobs.token_logprobs[0] is None
            assert mine.logprobs.token_logprobs[1:] == pytest.approx(other.logprobs.token_logprobs[1:], abs=1e-4)
            assert all(len(top) == 2 for top in mine.logprobs.top_logprobs[1:])
        assert ours.usage.completion_tokens == theirs.usage.completion_tokens
        assert [told["expert"] for told in ours.fedweave] == [told["expert"] for told in theirs.fedweave]


@contextmanager
def standing_before(
    upstream: str, told: Callable[[str], object | None], change: Callable[[dict], dict]
) -> Iterator[str]:
    """The address of a server that says of itself what ``told`` says of a path and hands on to a real one what
    ``change`` makes of a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer = told(self.path)
            self._say(
                httpx.get(f"{upstream}{self.path}").content if answer is None else json.dumps(answer).encode()
            )

        def do_POST(self):
            body = change(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._say(httpx.post(f"{upstream}{self.path}", json=body, timeout=300).content)

        def _say(self, content: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def like_vllm(upstream):
    """A server that describes itself as vLLM does and offers fields that ours has not; it notes what it is sent."""
    sent: list[dict] = []
    more = ("logit_bias", "ignore_eos", "response_format")
    described = {"components": {"schemas": {"CompletionRequest": {"properties": dict.fromkeys([*more, "n"])}}}}

    def noted(body: dict) -> dict:
        sent.append(body)
        return {name: value for name, value in body.items() if name not in more}

    with standing_before(upstream, lambda path: described if path == "/openapi.json" else None, noted) as url:
        yield url, sent


def test_what_the_upstream_offers_is_handed_on_and_nothing_else(model, like_vllm):
    url, sent = like_vllm
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    more = {"logit_bias": {"7": 2.5}, "ignore_eos": True, "response_format": schema}
    with running(model, upstream=url) as gateway:
        client = gateway.client()
        client.chat.completions.create(**ask(PROMPTS[0], max_tokens=2), extra_body=more)
        assert {name: sent[-1][name] for name in more} == more
        assert "n" not in sent[-1] and sent[-1]["stop_token_ids"] == []
        for name, message in (("temprature", "there is no such field"), ("guided_json", "not offered")):
            with pytest.raises(openai.BadRequestError, match=f"{name}: {message}"):
                client.chat.completions.create(**ask(PROMPTS[0], max_tokens=2), extra_body={name: {"a": 1}})
    assert len(sent) == 1


def test_many_clients_at_once(gateway, twin):
    prompts = [f"{p} {i}" for i in range(6) for p in PROMPTS]
    expected = {p: a.text for p, a in zip(prompts, twin.generate(prompts, max_new_tokens=8), strict=True)}
    answers = {}

    def one(prompt: str) -> None:
        answer = gateway.client().chat.completions.create(**ask(prompt, max_tokens=8))
        answers[prompt] = answer.choices[0].message.content

    threads = [threading.Thread(target=one, args=(p,)) for p in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert answers == expected
    assert gateway.backend.running == gateway.backend.waiting == 0


def test_a_client_that_hangs_up_frees_the_upstream(gateway, upstream):
    with httpx.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json=ask(PROMPTS[0], max_tokens=48, stream=True), timeout=120
    ) as response:
        next(response.iter_lines())

    def free() -> bool:
        return httpx.get(f"{upstream}/health").json()["running"] == 0 and gateway.backend.running == 0

    wait_for(free, "the end of an answer for nobody")


def test_mixtures_need_the_experts_side_by_side(gateway):
    with pytest.raises(openai.BadRequestError, match="one expert per request"):
        gateway.client().chat.completions.create(**ask(PROMPTS[0]), extra_body={"routing": "soft"})
    assert httpx.get(f"{gateway.url}/health").json()["status"] == "ok"


class Misbehaving(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status: int, content: bytes, length: int | None = None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.reply(200, json.dumps({"data": [{"id": "base"}]}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = b'data: {"choices": [{"index": 0, "text": "begun"}]}\n\n'
        {
            "missing": lambda: self.reply(404, b'{"error": {"message": "no such model"}}'),
            "busy": lambda: self.reply(429, b'{"error": {"message": "slow down"}}'),
            "broken": lambda: self.reply(500, b"<html>oops</html>"),
            "garbage": lambda: self.reply(200, b"data: {not json\n\n"),
            "empty": lambda: self.reply(200, b""),
            "cut": lambda: (self.reply(200, chunk, 10_000), self.connection.shutdown(socket.SHUT_RDWR)),
        }[self.server.how]()


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("missing", 502, "--lora-modules expert_0"),
        ("busy", 429, "slow down"),
        ("broken", 502, "refuses (500)"),
        ("garbage", 502, "not understood"),
        ("empty", 502, "empty answer"),
        ("cut", 502, "failed"),
    ],
)
def test_an_upstream_that_misbehaves(model, how, status, message):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving)
    server.how, server.daemon_threads = how, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with running(model, upstream=url) as gateway:
        response = httpx.post(f"{gateway.url}/v1/chat/completions", json=ask(PROMPTS[0]), timeout=120)
        assert response.status_code == status
        assert message in response.json()["error"]["message"]
        if how == "cut":  # within a stream the status is out: the error is an event
            lines = httpx.post(
                f"{gateway.url}/v1/chat/completions", json=ask(PROMPTS[0], stream=True), timeout=120
            ).text
            assert "begun" in lines and '"error"' in lines and "[DONE]" not in lines
        health = httpx.get(f"{gateway.url}/health")
        assert health.status_code == 503 and "does not serve expert_0" in health.json()["reason"]
    server.shutdown()


def test_an_upstream_that_is_away(model):
    with running(model, upstream="http://127.0.0.1:9") as gateway:
        with pytest.raises(openai.InternalServerError) as caught:
            gateway.client().chat.completions.create(**ask(PROMPTS[0]))
        assert caught.value.status_code == 502
        assert httpx.get(f"{gateway.url}/health").status_code == 503


@pytest.fixture(scope="module")
def like_sglang(upstream):
    """A server that takes an adapter from lora_path alone and answers every model's name with the bare backbone; a
    real one stands behind it."""

    def by_path(body: dict) -> dict:
        adapter = body.pop("lora_path", "base")
        return {**body, "model": adapter}

    with standing_before(upstream, lambda path: {"data": [{"id": "the-backbone"}]}, by_path) as url:
        yield url


def test_sglang_is_told_the_expert_in_its_own_field(model, twin, like_sglang):
    with running(model, upstream=like_sglang, kind="sglang") as gateway:
        for prompt in PROMPTS:
            expected = twin.generate([prompt], max_new_tokens=8)[0]
            answer = gateway.client().chat.completions.create(**ask(prompt, max_tokens=8))
            assert answer.choices[0].message.content == expected.text
        bare = twin.generate(PROMPTS[:1], adapter="base", max_new_tokens=8)[0]
        answer = gateway.client().chat.completions.create(**{**ask(PROMPTS[0], max_tokens=8), "model": "base"})
        assert answer.choices[0].message.content == bare.text


@pytest.mark.parametrize(("kind", "where", "told"), [
    ("vllm", "upstream", ""), ("sglang", "like_sglang", ""), ("vllm", "like_sglang", "does not apply")
])  # fmt: skip
def test_an_upstream_that_applies_no_expert_is_found_out(twin, request, kind, where, told):
    async def ask_it() -> str:
        gateway = Gateway(twin, LIMITS, request.getfixturevalue(where), kind=kind)
        try:
            return await gateway.unapplied()
        finally:
            await gateway.stop()

    found = asyncio.run(ask_it())
    assert told in found and bool(found) == bool(told)
