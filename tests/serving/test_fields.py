"""What clients ask for beyond a prompt: every field is acted on, known to change nothing, or refused."""

import json

import httpx
import pytest
import torch

from tests.helpers import PROMPTS
from tests.serving.conftest import ask


def test_fields_that_ask_for_nothing_are_taken(server, twin):
    idle = {
        "best_of": 1, "tools": [], "tool_choice": "auto", "logit_bias": {}, "ignore_eos": False, "user": "me",
        "metadata": {"a": "b"}, "store": True, "truncate_prompt_tokens": None, "guided_json": None, "suffix": "",
        "response_format": {"type": "text"}, "logprobs": False, "frequency_penalty": 0, "n": None,
    }  # fmt: skip
    body = ask(PROMPTS[0], max_tokens=6, **idle)
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["message"]["content"] == twin.generate(PROMPTS[:1], max_new_tokens=6)[0].text


def test_several_answers_to_one_prompt(server, twin):
    client = server.client()
    drawn = ask(PROMPTS[0], max_tokens=12, temperature=1.5, seed=1)
    answer = client.chat.completions.create(**drawn, n=3)
    texts = [c.message.content for c in answer.choices]
    assert [c.index for c in answer.choices] == [0, 1, 2] and len(set(texts)) > 1
    assert texts[0] == client.chat.completions.create(**drawn).choices[0].message.content
    assert answer.usage.prompt_tokens == len(twin.backbone.prompts.encode_prompts(PROMPTS[:1])[0].ids)
    pieces = ["", "", ""]
    for chunk in client.chat.completions.create(**drawn, n=3, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert pieces == texts
    both = client.completions.create(model="fedweave", prompt=PROMPTS[:2], max_tokens=4, n=2)
    assert both.choices[0].text == both.choices[1].text and len(both.choices) == 4


def test_options_are_the_models_own(server, twin):
    client, free = server.client(), twin.generate(PROMPTS[:1], max_new_tokens=12)[0]
    for field, option, value in (
        ("frequency_penalty", "frequency_penalty", 2.0),
        ("presence_penalty", "presence_penalty", 2.0),
        ("stop_token_ids", "stop_token_ids", [free.tokens[6]]),
        ("min_tokens", "min_new_tokens", 7),
        ("response_format", "json_object", True),
    ):
        sent = {"type": "json_object"} if field == "response_format" else value
        body = ask(PROMPTS[0], max_tokens=12, extra_body={field: sent})
        expected = twin.generate(PROMPTS[:1], max_new_tokens=12, **{option: value})[0]
        assert client.chat.completions.create(**body).choices[0].message.content == expected.text, field


def test_json_mode_gives_an_object_or_says_that_it_was_cut(server):
    body = ask(PROMPTS[0], max_tokens=48, response_format={"type": "json_object"})
    choice = server.client().chat.completions.create(**body).choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_log_probabilities_of_a_chat(server, twin):
    expected = twin.generate(PROMPTS[:1], max_new_tokens=5, logprobs=2)[0]
    body = ask(PROMPTS[0], max_tokens=5, logprobs=True, top_logprobs=2)
    content = server.client().chat.completions.create(**body).choices[0].logprobs.content
    assert [c.logprob for c in content] == pytest.approx([s.logprob for s in expected.scores], abs=1e-4)
    assert [len(c.top_logprobs) for c in content] == [2] * 5
    assert content[0].token == twin.backbone.tokenizer.decode([expected.tokens[0]])


def test_log_likelihoods_as_lm_eval_reads_them(server, twin):
    """Its request (token ids, echo, one token more), and its sums over what follows the context."""
    context = twin.backbone.prompts.encode_prompts(PROMPTS[:1])[0].ids.tolist()
    tokenizer = twin.backbone.tokenizer
    more = tokenizer(" She went to the park.", add_special_tokens=False)["input_ids"]
    answer = server.client().completions.create(
        model="base", prompt=[context + more], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    told = answer.choices[0].logprobs
    assert len(told.token_logprobs) == len(context) + len(more) + 1 and told.token_logprobs[0] is None
    assert answer.choices[0].text.startswith(tokenizer.decode(context + more))
    found = sum(told.token_logprobs[len(context) : -1])
    with torch.no_grad(), twin.backbone.decoding() as plain:
        logits = plain(torch.tensor([context + more])).logits[0].float().log_softmax(-1)
    expected = sum(float(logits[len(context) + i - 1, token]) for i, token in enumerate(more))
    assert found == pytest.approx(expected, abs=1e-2)
    greedy = [
        lp == max(top.values()) for lp, top in zip(told.token_logprobs[1:], told.top_logprobs[1:], strict=True)
    ]
    assert greedy[-1]  # the token that was chosen is the likeliest, to the bit
    assert told.text_offset[0] == 0 and told.text_offset == sorted(told.text_offset)


def test_a_prompt_is_echoed_without_log_probabilities(server):
    answer = server.client().completions.create(model="fedweave", prompt=PROMPTS[0], max_tokens=2, echo=True)
    assert answer.choices[0].text.startswith(PROMPTS[0]) and answer.choices[0].logprobs is None


def test_a_stream_has_the_log_probabilities_of_its_tokens(server, twin):
    expected = twin.generate(PROMPTS[:1], max_new_tokens=6, logprobs=2)[0]
    client = server.client()
    stream = client.chat.completions.create(
        **ask(PROMPTS[0], max_tokens=6, logprobs=True, top_logprobs=2, stream=True)
    )
    told = [e for c in stream if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.logprob for e in told] == pytest.approx([score.logprob for score in expected.scores], abs=1e-4)
    assert all(len(e.top_logprobs) == 2 for e in told)
    asked = {"model": "fedweave", "prompt": PROMPTS[:1], "max_tokens": 6, "logprobs": 1}
    whole = client.completions.create(**asked).choices[0].logprobs
    chunks = [c.choices[0].logprobs for c in client.completions.create(**asked, stream=True) if c.choices]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [x for chunk in chunks if chunk for x in getattr(chunk, name)] == getattr(whole, name), name


def test_tokens_are_told_by_their_ids_where_that_is_asked(server, twin):
    asked = {"model": "expert_1", "prompt": PROMPTS[:1], "max_tokens": 4, "logprobs": 1}
    told = server.client().completions.create(**asked, extra_body={"return_tokens_as_token_ids": True})
    ids = [int(token.removeprefix("token_id:")) for token in told.choices[0].logprobs.tokens]
    assert twin.backbone.tokenizer.decode(ids, skip_special_tokens=True) == told.choices[0].text
    assert all(
        top == {f"token_id:{i}": top[f"token_id:{i}"]}
        for i, top in zip(ids, told.choices[0].logprobs.top_logprobs, strict=True)
    )
