"""Thousands of strange requests: each is answered or refused in OpenAI's shape, none is the server's mistake.

Each case follows from its number, so that a failure can be had again; FEDWEAVE_DAMAGES=1000 tries more of them.
"""

import json
import os
import random
import socket

import httpx
import pytest

from fedweave.errors import UserError
from fedweave.router.mlp import active_experts
from fedweave.serving.server import Patience
from tests.serving.conftest import ask, running

TRIES = int(os.environ.get("FEDWEAVE_DAMAGES", "150"))
WORDS = [None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e-300, 1e308, 2**31, 2**63, 2**64, 10**400, -(2**70),
    float("nan"), float("inf"), "", " ", "x", "\0", "\ud800", "\u202e", "x" * 5000, "top" + "9" * 5000,
    "top2", "soft", "expert_0", "expert_99", "base", "fedweave", "[", [], [[]], ["x"] * 40, [1], [-1],
    [2**40], [None], [[1, 2], [3]], {}, {"a": 1}, {"type": "json_object"}, {"type": "json_schema"},
    {"include_usage": "x"}]  # fmt: skip
FIELDS = ["model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids", "min_tokens",
    "frequency_penalty", "presence_penalty", "response_format", "n", "stream", "stream_options", "routing",
    "logprobs", "top_logprobs", "echo", "tools", "suffix", "user", "best_of", "logit_bias", "temprature",
    "__class__", ""]  # fmt: skip


def strange(dice: random.Random) -> tuple[str, bytes]:
    """(endpoint, body)"""
    chat = dice.random() < 0.6
    body = ask("How many?", max_tokens=2) if chat else {"model": "fedweave", "prompt": "How many", "max_tokens": 2}
    for _ in range(dice.choice([1, 1, 2, 3])):
        kind, field = dice.randrange(10), dice.choice(FIELDS)
        if kind == 0:
            body.pop(dice.choice(list(body)), None) if body else None
        elif kind == 1 and chat and isinstance(body.get("messages"), list) and body["messages"]:
            message = dice.choice(body["messages"])
            if isinstance(message, dict):
                message[dice.choice(["role", "content", "name", "x"])] = dice.choice(WORDS)
        elif kind == 2 and chat:
            roles = ["system", "developer", "user", "assistant", "tool", "root", ""]
            texts = ["", "x", "\0", [{"type": "text", "text": "x"}], [{"type": "image_url"}], [{}], None]
            body["messages"] = [{"role": dice.choice(roles), "content": dice.choice(texts)} for _ in range(3)]
        elif kind == 3 and not chat:
            body["prompt"] = dice.choice(
                [["a", "b"], [1, 2, 3], [[1], [2]], [0] * 5000, "", ["", ""], [[]], [True], [10**9]]
            )
        else:
            body[field] = dice.choice(WORDS)
    data = json.dumps(body).encode()
    kind = dice.randrange(12)
    if kind == 0:
        data = data[: dice.randrange(len(data))]
    elif kind == 1:
        spoilt = bytearray(data)
        spoilt[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        data = bytes(spoilt)
    elif kind == 2:
        data = dice.choice(
            [b"", b"[]", b"null", b"[" * 5000, b'{"a":' * 3000, dice.randbytes(200), b"\xff\xfe", b"1" * 9999]
        )
    return dice.choice(["/v1/chat/completions" if chat else "/v1/completions"] * 8 + ["/v1/models/x", "/v1/"]), data


def test_a_strange_request_is_answered_or_refused(server):
    failures, seen = [], set()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for number in range(TRIES):
            path, body = strange(random.Random(number))
            response = client.post(path, content=body, headers={"Content-Type": "application/json"})
            seen.add(response.status_code)
            if response.status_code >= 500:
                failures.append((number, path, response.status_code, body[:300]))
            elif response.status_code >= 400:
                said = response.json()["error"]["message"]
                assert said and "Traceback" not in said and len(said) < 8000, (number, said)
        assert client.post("/v1/chat/completions", json=ask("How many?", max_tokens=2)).status_code == 200
    assert not failures, "\n".join(map(str, failures))
    assert {200, 400} <= seen


def test_thousands_of_digits_are_no_routing(server):
    with pytest.raises(UserError, match="use sparse, soft, or topK"):
        active_experts("top" + "9" * 5000)
    response = httpx.post(f"{server.url}/v1/chat/completions", json=ask("Hi", routing="top" + "9" * 5000))
    assert response.status_code == 400 and len(response.text) < 1000


HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
NEXT = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\nPOST /v1/chat"


@pytest.mark.parametrize("sent", [HALF, NEXT], ids=["half of a body", "half of a second request"])
def test_requests_that_stop_half_way_are_closed(model, monkeypatch, sent):
    monkeypatch.setattr(Patience, "patience", 0.3)
    with running(model) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        waiting = [socket.create_connection(address, timeout=60) for _ in range(100)]
        for one in waiting:
            one.sendall(sent)
        for one in waiting:
            while one.recv(65536):  # an answer, or a refusal, and then the end
                pass
            one.close()
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_endless_headers_are_cut_off(server):
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    with socket.create_connection(address, timeout=60) as one:
        one.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):  # reset or broken, as it comes
            for number in range(10_000):
                one.sendall(b"X-%d: %s\r\n" % (number, b"x" * 10_000))
