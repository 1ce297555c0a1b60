"""What shapes an answer beyond transformers' options: penalties, stop tokens, log-probabilities, JSON mode."""

import json
import random
from dataclasses import fields

import pytest
import torch

from fedweave.backbone.gguf import build_tokenizer
from fedweave.errors import UserError
from fedweave.inference import rows
from fedweave.inference.json_text import JsonText, JsonTokens
from fedweave.inference.sampling import Options, Sampling, TokenChooser
from tests.backbone.test_gguf import write_pieces

PROMPT = "Fix the grammar: Ada go to the park."


def test_the_typed_options_are_those_that_there_are():
    assert list(Options.__annotations__) == [field.name for field in fields(Sampling)]


def test_penalties_count_the_answers_own_tokens():
    chooser = TokenChooser(Sampling(frequency_penalty=0.5, presence_penalty=0.25), torch.tensor([2, 2, 2]), [])
    logits = torch.tensor([1.0, 0.9, 0.8, 0.0])
    assert chooser.choose(logits, []) == 0  # the prompt's own tokens count for nothing
    assert chooser.choose(logits, [0]) == 1  # 1 - 0.75
    assert chooser.choose(logits, [0, 1, 2]) == 0
    assert chooser.choose(logits, [0, 0, 1, 2]) == 1  # 1 - 1.25 against 0.9 - 0.75


def test_stop_tokens_end_an_answer_and_a_least_length_holds_them_off(model):
    free = model.generate([PROMPT], max_new_tokens=12)[0].tokens
    stop = free[5]
    at = free.index(stop)
    stopped = model.generate([PROMPT], max_new_tokens=12, stop_token_ids=[stop])[0]
    assert stopped.tokens == free[:at] and stopped.ended == "stop"
    longer = model.generate([PROMPT], max_new_tokens=12, stop_token_ids=[stop], min_new_tokens=8)[0]
    assert len(longer.tokens) >= 8 and stop not in longer.tokens[:8]
    with pytest.raises(UserError, match="min_new_tokens must not be more"):
        model.generate([PROMPT], max_new_tokens=4, min_new_tokens=5)


def test_a_long_prompts_logits_are_not_held_together(model, monkeypatch):
    """As many tokens as a prompt may have, times the vocabulary, would be more than a server's memory."""
    options = {"max_new_tokens": 1, "logprobs": 2, "echo": True}
    whole, real, seen = model.generate([PROMPT], **options)[0].scores, model.backbone.logits, []
    monkeypatch.setattr(rows, "_SCORED", 4)
    monkeypatch.setattr(model.backbone, "logits", lambda hidden: seen.append(len(hidden)) or real(hidden))
    found = model.generate([PROMPT], **options)[0].scores
    assert max(seen) == 4 and len(found) > 8
    assert [one.token for one in found] == [one.token for one in whole]
    assert [one.logprob for one in found[1:]] == pytest.approx([one.logprob for one in whole[1:]], abs=1e-5)


def test_log_probabilities_are_the_models_own(model):
    """Against transformers' logits over prompt and answer, with the expert in force."""
    (answer,) = model.generate([PROMPT], max_new_tokens=6, logprobs=3, echo=True, adapter="base")
    prompt = model.backbone.prompts.encode_prompts([PROMPT])[0].ids.tolist()
    ids = prompt + answer.tokens
    assert [s.token for s in answer.scores] == ids and answer.scores[0].logprob is None
    with torch.no_grad(), model.backbone.decoding() as plain:
        expected = plain(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    for at, score in enumerate(answer.scores[1:]):
        assert score.logprob == pytest.approx(float(expected[at, score.token]), abs=2e-3)
        assert len(score.top) == 3 and max(score.top.values()) == pytest.approx(float(expected[at].max()), abs=2e-3)
    for score in answer.scores[len(prompt) :]:
        assert score.logprob == max(score.top.values())  # greedy, to the bit
    plain_scores = model.generate([PROMPT], max_new_tokens=6, logprobs=0)[0].scores
    assert len(plain_scores) == 6 and plain_scores[0].top == {}
    with pytest.raises(UserError, match="echo has no effect without logprobs"):
        model.generate([PROMPT], echo=True)


GOOD = [
    "{}", '{"a": 1}', '{"a":[1,-2.5e+3,{"b":null}],"c":"x\\"\\u00e9\\n"}', ' {"t": true, "f": false, "n": 0}',
    '{"a": []}',
]  # fmt: skip
BAD = [
    "[1]", "1", '{"a" 1}', '{"a": 01}', '{"a": +1}', '{"a": tru}', '{"a": 1,}', '{"a": [1,]}', "{a: 1}",
    '{"a": 1}}', '{"a": "\\x"}', '{"a": "\n"}', '{"a": 1.}', '{"a": [}', "{]", '{"a": 1 2}', '{"a": -}',
    '{  "a": 1}', '{"a": nul1}',
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_every_beginning_of_an_object_may_go_on(text):
    json.loads(text)
    state = JsonText()
    for i, c in enumerate(text):
        assert state.add(c)
        assert state.complete == (i == len(text) - 1)


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_object_is_refused(text):
    state = JsonText()
    assert not (state.add(text) and state.complete)


def test_what_python_reads_and_what_is_accepted_agree():
    """Random small texts over JSON's own characters; blanks in a row are refused on purpose."""
    rng, agreed, parts = random.Random(0), 0, ['"a"', ":", "1", "0", "-", ".", "e", "[", "]", "{", "}", ",", "true"]
    for _ in range(30_000):
        text = '{"a":' + "".join(rng.choices(parts, k=rng.randint(1, 5))) + "}"
        try:
            valid = isinstance(json.loads(text), dict)
        except ValueError:
            valid = False
        state = JsonText()
        assert (state.add(text) and state.complete) == valid, text
        agreed += valid
    assert agreed > 5


@pytest.fixture
def chooser(backbone):
    """Of a row in JSON mode whose text so far is this."""

    def make(text: str, **options) -> TokenChooser:
        ends = list(backbone.end_ids)
        grammar = JsonTokens(backbone.tokenizer, ends)
        assert grammar.text.add(text)
        return TokenChooser(Sampling(json_object=True, **options), torch.tensor([1, 2, 3]), ends, 0, grammar)

    return make


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}, {"do_sample": True, "top_p": 1e-3}])
def test_in_json_mode_options_may_leave_nothing_that_fits(chooser, backbone, options):
    """Then the likeliest token that does is taken: no draw from nothing, which would end everybody's answers."""
    (begin,) = backbone.tokenizer.encode("{", add_special_tokens=False)
    logits = torch.linspace(0, 30, len(backbone.tokenizer))
    fitting = {token for token in range(len(logits)) if JsonText().add(backbone.tokenizer.decode([token]) or "x")}
    assert begin in fitting
    before = logits.clone()
    assert chooser("", **options).choose(logits, []) == max(fitting)
    assert torch.equal(logits, before), "log-probabilities are read from them afterwards"


def test_a_draw_from_no_token_ends_nobody_elses_answer(model, backbone):
    """Whoever forbids every token to end an answer too early leaves none."""
    every = list(range(len(backbone.head)))
    (answer,) = model.generate([PROMPT], do_sample=True, seed=1, stop_token_ids=every, min_new_tokens=2)
    assert answer.ended == "stop" and not answer.tokens


def test_a_whole_object_ends_before_its_least_length(chooser, backbone):
    """Nothing may follow, so that waiting for more would be waiting for ever."""
    one = chooser('{"a": 1}', min_new_tokens=40)
    assert one.choose(torch.zeros(len(backbone.tokenizer)), [5, 6]) in backbone.end_ids


def test_the_blank_that_a_piece_begins_with_counts(tmp_path):
    """A decoder of SentencePiece drops it from a piece alone: 1 and " 2" are not 12."""
    pieces = ["<unk>", "<s>", "</s>", "▁", *'{}":12a', "▁2", "▁{", "tr", "ue", "▁ue"]
    tokenizer = build_tokenizer(write_pieces(tmp_path, pieces))

    def fits(*value: str) -> bool:
        grammar = JsonTokens(tokenizer, [2])
        answer = ["▁{", '"', "a", '"', ":", *value, "}"]
        return all(grammar.take(tokenizer.convert_tokens_to_ids(piece)) for piece in answer)

    assert fits("1", "2") and fits("▁2") and fits("tr", "ue")
    assert not fits("1", "▁2") and not fits("tr", "▁ue")


def test_more_likeliest_tokens_than_there_are_is_all(model, backbone):
    (answer,) = model.generate([PROMPT], max_new_tokens=1, logprobs=10**6)
    assert all(len(score.top) == len(backbone.head) for score in answer.scores)


@pytest.mark.parametrize("token", [10**30, 2**31, -1])
def test_a_stop_token_is_a_token(token):
    with pytest.raises(UserError, match="stop_token_ids: a token is a number from 0"):
        Sampling.of({"stop_token_ids": [token], "min_new_tokens": 1})


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 1.5, "seed": 3}])
def test_an_answer_in_json_mode_is_an_object_or_the_beginning_of_one(model, options):
    answers = model.generate([PROMPT, "How many?"], max_new_tokens=60, json_object=True, **options)
    for answer in answers:
        if answer.ended == "stop":
            assert isinstance(json.loads(answer.text), dict)
        else:
            assert answer.text.startswith("{") and JsonText().add(answer.text)
