"""Text to tokens: what the model reads, where the answer starts, what the feature averages, what is cut."""

import copy

import numpy as np
import pytest

from fedweave.backbone.prompts import LongAnswer, PromptFormat, RefusedChat
from fedweave.config import BackboneConfig
from fedweave.data.examples import Example
from fedweave.data.sample import make_sample
from fedweave.errors import UserError

ASK = "How many apples in all?"
TURNS = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Dan has 3 coins."},
    {"role": "assistant", "content": "And?"},
    {"role": "user", "content": ASK},
)


@pytest.fixture(params=["plain", "chat"])
def make_format(request, tokenizer, chat_tokenizer):
    """Call with backbone settings to get the format of either kind."""
    tokens = tokenizer if request.param == "plain" else chat_tokenizer

    def make(**settings) -> PromptFormat:
        return PromptFormat(tokens, BackboneConfig(prompt=request.param, **{"pool": "content", **settings}))

    return make


def sample() -> list[Example]:
    return [e for pool in make_sample(5, seed=1)[0].values() for e in pool]


def example(prompt=ASK, response="3 + 4 = 7") -> Example:
    return Example(prompt, response, "sum", "site.jsonl:7")


def decode(form: PromptFormat, ids) -> str:
    return form.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def expected(form: PromptFormat, prompt: str) -> str:
    if form.kind == "plain":
        return f"{prompt}\n\nResponse:"
    return f"<|start|>user\n{prompt}<|end|>\n<|start|>assistant\n"


# -------------------------------------------------------------------------------------- rendering


def test_prompt_and_answer_decode_to_the_rendered_text(make_format):
    form = make_format()
    blank, end = (" ", "<eos>") if form.kind == "plain" else ("", "<|end|>")
    for e, encoded in zip(sample(), form.encode(sample()), strict=True):
        start = encoded.answer_start
        assert decode(form, encoded.ids[:start]) == expected(form, e.prompt)
        assert decode(form, encoded.ids[start:]) == f"{blank}{e.response}{end}"


def test_prompt_is_the_same_with_and_without_its_answer(make_format):
    """The router sees prompts alone at inference: training must not see other tokens."""
    form = make_format()
    alone = form.encode_prompts([e.prompt for e in sample()])
    for prompt, encoded in zip(alone, form.encode(sample()), strict=True):
        np.testing.assert_array_equal(encoded.prompt.ids, prompt.ids)
        np.testing.assert_array_equal(encoded.ids[: encoded.answer_start], prompt.ids)
        assert encoded.prompt.pool == prompt.pool
        assert not prompt.truncated


def test_an_example_is_encoded_the_same_alone_and_in_a_batch(make_format):
    form = make_format()
    for together, e in zip(form.encode(sample()), sample(), strict=True):
        np.testing.assert_array_equal(together.ids, form.encode([e])[0].ids)


def test_nothing_gives_nothing(make_format):
    assert make_format().encode([]) == []
    assert make_format().encode_prompts([]) == []


def test_blanks_around_the_answer_do_not_matter(make_format):
    form = make_format()
    tidy, untidy = form.encode([example(response="7"), example(response=" 7\n")])
    np.testing.assert_array_equal(tidy.ids, untidy.ids)


def test_messages_in_chat_are_rendered_by_the_template(chat_tokenizer):
    form = PromptFormat(chat_tokenizer, BackboneConfig(prompt="chat"))
    (encoded,) = form.encode_prompts([TURNS])
    rendered = "".join(f"<|start|>{m['role']}\n{m['content']}<|end|>\n" for m in TURNS) + "<|start|>assistant\n"
    assert decode(form, encoded.ids) == rendered


def test_messages_in_plain_keep_their_speakers(tokenizer):
    form = PromptFormat(tokenizer, BackboneConfig(prompt="plain"))
    (encoded,) = form.encode_prompts([TURNS])
    words = f"Be brief.\n\nDan has 3 coins.\n\nResponse: And?\n\n{ASK}\n\nResponse:"
    assert decode(form, encoded.ids) == words
    late = (*TURNS, {"role": "tool", "content": "7"}, {"role": "system", "content": "Now."})
    assert decode(form, form.encode_prompts([late])[0].ids) == words.removesuffix("\n\nResponse:") + (
        "\n\nTool: 7\n\nSystem: Now.\n\nResponse:"
    )


def test_a_plain_conversation_continues_what_training_rendered(tokenizer):
    """A question and its answer, as a row that was trained on, are the beginning of the next turn's prompt."""
    form = PromptFormat(tokenizer, BackboneConfig(prompt="plain", end_of_answer=False))
    first, then = sample()[:2]
    turns = ("user", first.prompt), ("assistant", first.response), ("user", then.prompt)
    (whole,) = form.encode_prompts([tuple({"role": role, "content": text} for role, text in turns)])
    (row,) = form.encode([first])
    np.testing.assert_array_equal(whole.ids[: len(row.ids)], row.ids)


# -------------------------------------------------------------------------------------- what the router reads


def test_the_router_reads_the_last_turn_as_if_it_were_asked_alone(make_format):
    form = make_format()
    (chat,), (alone,) = form.encode_prompts([TURNS]), form.encode_prompts([(TURNS[0], TURNS[-1])])
    np.testing.assert_array_equal(chat.routed.ids, alone.ids)
    assert chat.routed.pool == alone.pool and len(chat.ids) > len(alone.ids)
    (row,) = form.encode([example(prompt=TURNS)])  # in training as in use
    np.testing.assert_array_equal(row.prompt.routed.ids, alone.ids)
    np.testing.assert_array_equal(row.ids[: row.answer_start], chat.ids)


def test_single_turns_and_all_turns_are_read_as_they_are(make_format):
    for prompt in (ASK, TURNS[-1:], (TURNS[0], TURNS[-1])):
        assert make_format().encode_prompts([prompt])[0].asked is None
    (chat,) = make_format(turns="all").encode_prompts([TURNS])
    assert chat.routed is chat
    assert make_format(turns="all").settings() != make_format().settings()


def test_auto_is_chat_where_there_is_a_template(tokenizer, chat_tokenizer):
    assert PromptFormat(tokenizer, BackboneConfig()).kind == "plain"
    assert PromptFormat(chat_tokenizer, BackboneConfig()).kind == "chat"
    assert PromptFormat(chat_tokenizer, BackboneConfig(prompt="plain")).kind == "plain"


def test_chat_without_a_template_is_a_user_error(tokenizer):
    with pytest.raises(UserError, match=r"backbone\.prompt=chat.*some/model.*use backbone\.prompt=plain"):
        PromptFormat(tokenizer, BackboneConfig(model="some/model", prompt="chat"))


# -------------------------------------------------------------------------------------- end token


def test_end_token_is_what_the_template_puts_behind_an_answer(chat_tokenizer):
    assert chat_tokenizer.eos_token == "<eos>"
    for kind, token in (("chat", "<|end|>"), ("plain", "<eos>")):
        form = PromptFormat(chat_tokenizer, BackboneConfig(prompt=kind))
        assert form.end_id == chat_tokenizer.convert_tokens_to_ids(token)


def test_end_token_is_appended_only_on_demand(make_format):
    (ended,), (open_ended,) = (
        make_format().encode([example()]),
        make_format(end_of_answer=False).encode([example()]),
    )
    np.testing.assert_array_equal(ended.ids, [*open_ended.ids, make_format().end_id])
    assert open_ended.ids[-1] != make_format().end_id
    assert ended.answer_start == open_ended.answer_start


# -------------------------------------------------------------------------------------- pooled span


def test_content_pools_exactly_the_users_words(make_format):
    form = make_format(pool="content")
    for e, prompt in zip(sample(), form.encode_prompts([e.prompt for e in sample()]), strict=True):
        assert decode(form, prompt.ids[slice(*prompt.pool)]) == e.prompt


def test_all_pools_the_whole_prompt(make_format):
    (prompt,) = make_format(pool="all").encode_prompts([ASK])
    assert prompt.pool == (0, len(prompt.ids))


def test_content_of_a_conversation_begins_behind_the_system_prompt(chat_tokenizer):
    form = PromptFormat(chat_tokenizer, BackboneConfig(pool="content"))
    (prompt,) = form.encode_prompts([TURNS])
    words = decode(form, prompt.ids[slice(*prompt.pool)])
    assert words.startswith("Dan has 3 coins.<|end|>")
    assert words.endswith(f"user\n{ASK}")


def test_blanks_around_the_words_are_not_pooled_in_chat(chat_tokenizer):
    text, start, end = PromptFormat(chat_tokenizer, BackboneConfig()).render(f"  {ASK}\n")
    assert text[start:end] == ASK


@pytest.mark.parametrize("words", ["a", "user", "assistant"])
def test_words_that_the_template_uses_itself_are_found_where_the_user_said_them(chat_tokenizer, words):
    text, start, end = PromptFormat(chat_tokenizer, BackboneConfig()).render(words)
    assert (start, end) == (len("<|start|>user\n"), len(f"<|start|>user\n{words}"))
    assert text[start:end] == words


def test_words_that_the_system_prompt_uses_are_found_where_the_user_said_them(chat_tokenizer):
    turns = ({"role": "system", "content": "Say Hello first."}, {"role": "user", "content": "Hello"})
    text, start, end = PromptFormat(chat_tokenizer, BackboneConfig()).render(turns)
    assert (text[start:end], start) == ("Hello", text.rfind("Hello"))


# -------------------------------------------------------------------------------------- truncation

LONG = "Dan has 3 coins and finds 4 more. " * 10 + ASK


def test_long_prompt_loses_the_beginning_of_its_words_and_nothing_else(make_format):
    form, whole = make_format(max_length=48), make_format()
    (short,), (full,) = form.encode_prompts([LONG]), whole.encode_prompts([LONG])
    before, after = full.pool[0], len(full.ids) - full.pool[1]
    assert short.truncated and len(short.ids) == 48
    np.testing.assert_array_equal(short.ids[:before], full.ids[:before])
    np.testing.assert_array_equal(short.ids[before:], full.ids[len(full.ids) - 48 + before :])
    assert short.pool == (before, 48 - after)
    assert LONG.endswith(decode(form, short.ids[slice(*short.pool)]))


def test_long_example_keeps_its_answer_and_its_prompt_for_the_router(make_format):
    form, whole = make_format(max_length=48), make_format()
    (short,), (full,) = form.encode([example(prompt=LONG)]), whole.encode([example(prompt=LONG)])
    assert len(short.ids) == 48
    np.testing.assert_array_equal(short.ids[short.answer_start :], full.ids[full.answer_start :])
    tail = len(full.prompt.ids) - full.prompt.pool[1]  # the template behind the words
    np.testing.assert_array_equal(short.ids[: short.answer_start][-tail:], full.prompt.ids[-tail:])
    np.testing.assert_array_equal(short.prompt.ids, form.encode_prompts([LONG])[0].ids)
    assert len(short.prompt.ids) == 48  # the prompt alone has more room than beside its answer


def test_prompt_that_just_fits_is_whole(make_format):
    exact = len(make_format().encode([example(prompt=LONG)])[0].ids)
    for spare, cut in ((0, False), (-1, True)):
        (encoded,) = make_format(max_length=exact + spare).encode([example(prompt=LONG)])
        assert (encoded.answer_start < len(encoded.prompt.ids)) == cut
        assert len(encoded.ids) == exact + spare


def test_answer_without_room_for_its_prompt_names_the_row_and_the_remedies(make_format):
    with pytest.raises(LongAnswer) as caught:
        make_format(max_length=48).encode([example(), example(response="seven times eight " * 20)])
    message = str(caught.value)
    assert message.startswith("site.jsonl:7: the answer has ")
    for remedy in ("backbone.max_length=48", "shorten it", "data.long_answers=skip", "raise that length"):
        assert remedy in message


def test_one_word_of_the_prompt_is_room_enough(make_format):
    """The longest answer that fits leaves one token of the user's words; one token more does not fit."""
    whole = make_format()
    (full,) = whole.encode([example()])
    template = len(full.prompt.ids) - (full.prompt.pool[1] - full.prompt.pool[0])
    least = template + 1 + len(full.ids) - full.answer_start
    (encoded,) = make_format(max_length=least).encode([example()])
    assert decode(whole, encoded.ids[: encoded.answer_start]).count("?") == 1
    with pytest.raises(LongAnswer):
        make_format(max_length=least - 1).encode([example()])


def test_settings_tell_formats_apart_that_give_other_tokens(make_format):
    base = make_format().settings()
    assert base == make_format().settings()
    assert base != make_format(max_length=100).settings()
    assert base != make_format(pool="all").settings()
    assert (base["template"] is None) == (base["kind"] == "plain")


# -------------------------------------------------------------------------------------- templates that refuse

STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture
def strict(chat_tokenizer) -> PromptFormat:
    tokens = copy.deepcopy(chat_tokenizer)
    tokens.chat_template = STRICT
    return PromptFormat(tokens, BackboneConfig())


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("system", "Be brief."), ("user", ASK)], "System role not supported"),
        ([("user", "Dan has 3 coins."), ("user", ASK)], "Conversation roles must alternate"),
    ],
)
def test_a_template_that_refuses_a_row_gives_the_row_and_the_remedies(strict, turns, reason):
    messages = tuple({"role": role, "content": content} for role, content in turns)
    with pytest.raises(RefusedChat) as caught:
        strict.encode([example() for _ in range(3)] + [Example(messages, "x", "sum", "site.jsonl:9")])
    message = str(caught.value)
    assert message.startswith(f"site.jsonl:9: messages: the chat template refuses them ({reason}")
    assert message.endswith("or set backbone.prompt=plain.") and "\n" not in message
    with pytest.raises(UserError, match=reason):  # without a row, as the server asks
        strict.encode_prompts([messages])


@pytest.mark.parametrize("prompt", [(), ({"role": "system", "content": "Be brief."},)])
def test_a_chat_in_which_nobody_asks_is_refused(chat_tokenizer, prompt):
    with pytest.raises(RefusedChat, match="nobody asks anything"):
        PromptFormat(chat_tokenizer, BackboneConfig()).encode_prompts([prompt])


def test_the_chat_template_is_the_default_where_there_is_one(tokenizer, chat_tokenizer):
    kinds = [PromptFormat(tokens, BackboneConfig()).kind for tokens in (tokenizer, chat_tokenizer)]
    assert kinds == ["plain", "chat"]


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages[0] + 1 }}", "{{ messages | nothing }}"])
def test_a_template_that_is_no_program_is_one_sentence(chat_tokenizer, template):
    spoilt = copy.deepcopy(chat_tokenizer)
    spoilt.chat_template = template
    with pytest.raises(
        UserError, match=r"its chat template cannot be used \(.+\); mend it, or set backbone.prompt="
    ):
        PromptFormat(spoilt, BackboneConfig(prompt="chat"))
