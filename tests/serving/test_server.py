"""The server as OpenAI's own client sees it."""

import socket
import threading

import httpx
import openai
import pytest

from fedweave.backbone.load import load_backbone
from fedweave.config import BackboneConfig
from fedweave.errors import UserError
from fedweave.serving.app import Api
from fedweave.serving.jobs import Limits
from fedweave.serving.local import LocalBackend
from fedweave.serving.protocol import ChatRequest
from fedweave.serving.server import Patience
from tests.helpers import PATIENCE, PROMPTS, wait_for
from tests.serving.conftest import LIMITS, ask, running


def test_models(server, twin):
    experts = twin.mixture.layout.experts
    names = [m.id for m in server.client().models.list()]
    assert names == ["fedweave", *(f"expert_{m}" for m in range(experts)), "base"]
    assert server.client().models.retrieve("expert_0").id == "expert_0"


def test_nobody_is_told_where_the_backbone_lies(server, twin):
    folder = twin.backbone.name
    assert folder.startswith("/")
    for page in ("health", "v1/models"):
        told = httpx.get(f"{server.url}/{page}").text
        assert folder not in told and folder.rsplit("/", 1)[1] in told


def test_a_chat_answer_is_the_models_own(server, twin):
    for prompt in PROMPTS:
        expected = twin.generate([prompt], max_new_tokens=12)[0]
        answer = server.client().chat.completions.create(**ask(prompt, max_tokens=12))
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == expected.ended
        encoded = twin.backbone.prompts.encode_prompts([prompt])[0]
        assert answer.usage.prompt_tokens == len(encoded.ids)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.fedweave["expert"] == expected.expert and answer.fedweave["routing"] == "sparse"
        assert answer.fedweave["weights"] == pytest.approx(expected.weights, abs=1e-4)


def test_a_prompt_longer_than_training_is_answered_whole(server, twin):
    text = "Ben has 3 coins and finds 4 more. " * 30
    encoded = twin.backbone.prompts.encode_prompts([text], 464)[0]
    assert len(encoded.ids) > 128 and httpx.get(f"{server.url}/health").json()["max_prompt_tokens"] == 464
    answer = server.client().chat.completions.create(**ask(text, max_tokens=8))
    assert answer.usage.prompt_tokens == len(encoded.ids)
    assert answer.choices[0].message.content == twin.generate([text], max_new_tokens=8)[0].text


def test_a_stream_is_the_same_answer_in_pieces(server, twin):
    expected = twin.generate(PROMPTS[:1], max_new_tokens=16)[0]
    stream = server.client().chat.completions.create(
        **ask(PROMPTS[0], max_tokens=16, stream=True, stream_options={"include_usage": True})
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].fedweave["expert"] == expected.expert
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == expected.text and sum(map(bool, pieces)) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected.ended
    assert chunks[-1].choices == [] and 1 <= chunks[-1].usage.completion_tokens <= 16


def test_a_model_name_forces_an_expert(server, twin):
    texts = set()
    for m in range(twin.mixture.layout.experts):
        answer = server.client().chat.completions.create(
            **{**ask(PROMPTS[0], max_tokens=12), "model": f"expert_{m}"}
        )
        told = {"expert": m, "adapter": f"expert_{m}", "weights": None, "doubt": None, "routing": "sparse"}
        assert answer.fedweave == told
        texts.add(answer.choices[0].message.content)
    assert len(texts) > 1


@pytest.mark.parametrize("routing", ["soft", "top2"])
def test_other_routings_by_an_extra_field(server, twin, routing):
    expected = twin.generate(PROMPTS[:1], routing, max_new_tokens=12)[0]
    answer = server.client().chat.completions.create(
        **ask(PROMPTS[0], max_tokens=12), extra_body={"routing": routing}
    )
    assert answer.choices[0].message.content == expected.text


def test_completions_continue_texts_and_tokens_as_they_stand(server, twin):
    """The rendered prompt as a text, and as tokens, continues to the chat's answer."""
    expected = twin.generate(PROMPTS[:2], max_new_tokens=10)
    encoded = twin.backbone.prompts.encode_prompts(PROMPTS[:2])
    texts = [f"{p}\n\nResponse:" for p in PROMPTS[:2]]
    for prompt in (texts, [e.ids.tolist() for e in encoded]):
        answer = server.client().completions.create(model="fedweave", prompt=prompt, max_tokens=10)
        assert [c.text.strip() for c in answer.choices] == [e.text for e in expected]
        assert [f["expert"] for f in answer.fedweave] == [e.expert for e in expected]
        stream = server.client().completions.create(model="fedweave", prompt=prompt, max_tokens=10, stream=True)
        pieces = ["", ""]
        for chunk in stream:
            pieces[chunk.choices[0].index] += chunk.choices[0].text
        assert [p.strip() for p in pieces] == [e.text for e in expected]


def test_stop_strings_sampling_and_seeds(server, twin):
    client = server.client()
    free = twin.generate(PROMPTS[:1], max_new_tokens=24)[0].text
    answer = client.chat.completions.create(**ask(PROMPTS[0], max_tokens=24, stop=[free[4:6], "never"]))
    assert answer.choices[0].message.content == free[: free.index(free[4:6])].strip()
    assert answer.choices[0].finish_reason == "stop"
    drawn = ask(PROMPTS[0], max_tokens=12, temperature=1.5, top_p=0.95)
    texts = [client.chat.completions.create(**drawn, seed=s).choices[0].message.content for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}]
    whole = client.chat.completions.create(model="fedweave", messages=parts, max_tokens=24)
    assert whole.choices[0].message.content == free


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "body"),
        ({"model": "fedweave"}, 400, "messages"),
        ({"model": "fedweave", "messages": []}, 400, "messages"),
        ({"model": "fedweave", "messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
        ({"model": "fedweave", "messages": [{"role": "system", "content": "x"}]}, 400, "no user message"),
        ({"model": "fedweave", "messages": [{"role": "user", "content": " "}]}, 400, "empty"),
        (
            {"model": "fedweave", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "text parts",
        ),
        (ask("Hi", n=0), 400, "n: "),
        (ask("Hi", n=5), 400, "at most 4 answers"),
        (ask("Hi", temperature=3), 400, "temperature"),
        (ask("Hi", max_tokens=0), 400, "max_tokens"),
        (ask("Hi", max_tokens=49), 400, "at most 48 tokens"),
        (ask("Hi", stop=[""]), 400, "empty text"),
        (ask("Hi", tools=[{"type": "function"}]), 400, "tools: not offered"),
        (ask("Hi", top_logprobs=2), 400, "top_logprobs: has no effect"),
        (ask("Hi", temprature=0.5), 400, "temprature: there is no such field: did you mean 'temperature'"),
        (ask("Hi", ignore_eos=True), 400, "ignore_eos: not offered"),
        (ask("Hi", guided_json={"type": "object"}), 400, "guided_json: not offered"),
        (ask("Hi", chat_template="{{ messages }}"), 400, "chat_template: not offered"),
        (ask("Hi", continue_final_message=True), 400, "continue_final_message: not offered"),
        (ask("Hi", truncate_prompt_tokens=5), 400, "truncate_prompt_tokens: not offered"),
        (ask("Hi", best_of=2), 400, "best_of: not offered"),
        (ask("Hi", response_format={"type": "json_schema"}), 400, "json_object are offered, not 'json_schema'"),
        (ask("Hi", min_tokens=20, max_tokens=4), 400, "min_new_tokens must not be more"),
        (ask("Hi", presence_penalty=3), 400, "presence_penalty"),
        (ask("Hi", routing="best"), 400, "routing"),
        (ask("word " * 700), 400, "longer than 464 tokens"),
        (b'{"model": "fedweave", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "messages"),
        (b"[" * 10_000, 400, "body"),
        ({**ask("Hi"), "model": "gpt-9"}, 404, "'gpt-9' is not served here"),
        (ask("x" * 30_000), 413, "larger than 20000 bytes"),
    ],
)
def test_wrong_requests(server, body, status, message):
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = httpx.post(
        f"{server.url}/v1/chat/completions", headers={"content-type": "application/json"}, **content
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"] and set(error) == {"message", "type", "param", "code"}
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"


def test_wrong_completions_and_paths(server):
    client = server.client()
    for prompt in ("", [], [[]], [10**6], [-1]):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="fedweave", prompt=prompt)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")
    assert httpx.get(f"{server.url}/v1/nothing").json()["error"]["message"].startswith("GET /v1/nothing")
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405


def test_a_body_without_length_is_limited_too(server):
    def endless():
        for _ in range(100):
            yield b" " * 1000

    response = httpx.post(
        f"{server.url}/v1/chat/completions", content=endless(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413 and "larger than" in response.json()["error"]["message"]


def test_silent_connections_are_closed_and_answers_are_not(model, twin, monkeypatch):
    """Nothing sent, half of the headers sent, and a request whose answer takes longer than a silence may."""
    monkeypatch.setattr(Patience, "patience", 0.2)
    with running(model) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        for sent in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection(address, timeout=PATIENCE) as silent:
                silent.sendall(sent)
                assert silent.recv(1) == b""
        real, spent = server.backend.batch.advance, threading.Event()

        def slow(waiting):
            spent.wait(0.5)
            return real(waiting)

        server.backend.batch.advance = slow
        answer = server.client().chat.completions.create(**ask(PROMPTS[0], max_tokens=3))
        assert answer.choices[0].message.content == twin.generate(PROMPTS[:1], max_new_tokens=3)[0].text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_row(model, twin, stream):
    """Two long answers whose clients leave. After its first step an answer is held until the server knows that; its
    row must then be free at once, not after the rest of its 300 steps."""
    with running(model, Limits(2, 10, 300, 20_000)) as server:
        real, active, steps, left = server.backend.batch.advance, server.backend._active, [], []

        def held(waiting):
            steps.append(len(waiting))
            if not waiting:
                left.append(wait_for(lambda: all(a.cancelled for a in active.values()), "a hang-up"))
            return real(waiting)

        server.backend.batch.advance = held
        url, body = f"{server.url}/v1/chat/completions", ask(PROMPTS[0], max_tokens=300, stream=stream)
        for _ in range(2):
            before = len(steps)
            if stream:
                with httpx.stream("POST", url, json=body, timeout=120) as response:
                    next(response.iter_lines())
                    wait_for(lambda: len(steps) >= before + 2, "its second step")  # noqa: B023
            else:
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(url, json=body, timeout=httpx.Timeout(120, read=0.3))
        wait_for(lambda: server.backend.running == server.backend.waiting == 0, "a free row")
        assert len(left) >= 2 and len(steps) < 20
        server.backend.batch.advance = real
        answer = server.client().chat.completions.create(**ask(PROMPTS[1], max_tokens=6))
        assert answer.choices[0].message.content == twin.generate(PROMPTS[1:2], max_new_tokens=6)[0].text


def test_a_full_queue_asks_to_retry(model):
    with running(model, Limits(1, 1, 200, 20_000)) as server:
        slow = server.backend.batch.advance
        hold = threading.Event()

        def held(waiting):
            hold.wait(120)
            return slow(waiting)

        server.backend.batch.advance = held
        results = []

        def one() -> None:
            response = httpx.post(
                f"{server.url}/v1/chat/completions", json=ask(PROMPTS[0], max_tokens=4), timeout=120
            )
            results.append(response)

        threads = [threading.Thread(target=one) for _ in range(2)]
        threads[0].start()
        wait_for(lambda: server.backend.running == 1, "the first request")
        threads[1].start()
        wait_for(lambda: server.backend.waiting == 1, "the second request")
        with pytest.raises(openai.RateLimitError) as caught:
            server.client().chat.completions.create(**ask(PROMPTS[0], max_tokens=4))
        assert int(caught.value.response.headers["retry-after"]) >= 1
        hold.set()
        for thread in threads:
            thread.join(120)
        assert [r.status_code for r in results] == [200, 200]
        assert 'status="429"' in httpx.get(f"{server.url}/metrics").text


def test_a_failing_pass_is_an_error_and_the_server_goes_on(model, twin, capfd):
    with running(model) as server:

        def broken(waiting):
            raise RuntimeError("out of memory")
            yield

        server.backend.batch.advance = broken
        with pytest.raises(openai.InternalServerError, match="model failed"):
            server.client().chat.completions.create(**ask(PROMPTS[0], max_tokens=4))
        answer = server.client().chat.completions.create(**ask(PROMPTS[0], max_tokens=4))
        assert answer.choices[0].message.content == twin.generate(PROMPTS[:1], max_new_tokens=4)[0].text
    assert "out of memory" in capfd.readouterr().err  # the reason is in the log


def test_an_api_key_is_asked_for(model):
    with running(model, key="secret") as server:
        for wrong in ("guess", "", "secret2"):
            with pytest.raises((openai.AuthenticationError, openai.OpenAIError)):
                server.client(wrong).chat.completions.create(**ask(PROMPTS[0], max_tokens=4))
        assert httpx.get(f"{server.url}/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert server.client("secret").models.list()
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_metrics_count_what_happened(model):
    with running(model) as server:
        answer = server.client().chat.completions.create(**ask(PROMPTS[0], max_tokens=4))
        text = httpx.get(f"{server.url}/metrics").text
        usage, expert = answer.usage, answer.fedweave["expert"]
        assert f'fedweave_tokens_total{{kind="prompt"}} {usage.prompt_tokens}.0' in text
        assert f'fedweave_tokens_total{{kind="completion"}} {usage.completion_tokens}.0' in text
        assert f'fedweave_answers_total{{expert="expert_{expert}"}} 1.0' in text
        assert 'fedweave_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
        assert "fedweave_running 0.0" in text


def test_a_chat_template_decides_what_messages_may_be(chat_tokenizer, model_folder, tmp_path):
    """A backbone with a template: it renders turns and system prompts, and its refusals are the client's."""
    chat_tokenizer.save_pretrained(tmp_path)
    template = chat_tokenizer.chat_template
    refusing = (
        "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('user first') }}{% endif %}" + template
    )
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((model_folder("llama") / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(refusing)
    backbone = load_backbone(BackboneConfig(model=str(tmp_path), device="cpu", max_length=64))
    api = Api(backbone, ["expert_0"], LocalBackend.__new__(LocalBackend), LIMITS)
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "How many?")]
    body = ChatRequest(model="fedweave", messages=[{"role": r, "content": c} for r, c in turns])
    text = backbone.tokenizer.decode(api.encode(body)[0].ids)
    assert [text.index(c) for _, c in turns] == sorted(text.index(c) for _, c in turns)
    assert text.endswith("<|start|>assistant\n")
    body.messages = body.messages[2:]
    with pytest.raises(UserError, match="user first"):
        api.encode(body)
