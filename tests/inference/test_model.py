"""The public model: batches of mixed experts, sampling as transformers samples, streams, refusals."""

from collections import deque

import pytest
import torch
from transformers import GenerationConfig

from fedweave.backbone.features import compute_features
from fedweave.errors import UserError
from fedweave.inference import record
from fedweave.inference.generate import generate
from fedweave.inference.rows import Row
from fedweave.inference.sampling import Sampling
from fedweave.router.mlp import sparsify
from fedweave.runs.use import load
from tests.conftest import FAMILIES

PROMPTS = [
    "Fix the grammar: Ada go to the park.",
    "Mood of the review, one word:",
    "How many?",
    "Ben has 3 coins and finds 4 more. How many coins in all? " * 2,
    "Pick the fruit from this list: dog, plum, bus.",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_whole_batch_decoding(make_model, family):
    """The running batch and the recorded whole batch are two roads to the same tokens."""
    model = make_model(family)
    for routing in ("sparse", "soft", "top2"):
        weights = model.route(PROMPTS)
        encoded = model.backbone.prompts.encode_prompts(PROMPTS)
        theirs = generate(model.backbone, encoded, 20, model.mixture, model.theta, sparsify(weights, routing))
        ours = model.generate(PROMPTS, routing, max_new_tokens=20)
        # an answer that ends within a character keeps the broken one only in whole-batch decoding
        assert [a.text for a in ours] == [t.rstrip("\ufffd").strip() for t in theirs]
    assert len({a.expert for a in ours}) > 1, "one expert for all would test nothing"


def test_a_long_row_that_joins_late_finds_room(model):
    """The cache grows beneath an answer that is under way, and shrinks again."""
    encoded = model.backbone.prompts.encode_prompts([PROMPTS[0], PROMPTS[3] * 8], 400)
    short, long = (
        Row(model.backbone, prompt, torch.eye(3)[0], Sampling(max_new_tokens=tokens))
        for prompt, tokens in zip(encoded, (20, 6), strict=True)
    )
    batch = model.batch(2, short.room)
    for _ in range(4):
        list(batch.advance(deque([short] if not short.new else [])))
    waiting = deque([long])
    while waiting or not all(row.ended for row in batch.rows):
        list(batch.advance(waiting))
        assert batch.cache.length == long.room
    gates = torch.eye(3)[0].expand(2, 3)
    alone = generate(model.backbone, encoded, [20, 6], model.mixture, model.theta, gates)
    assert [short.text.text, long.text.text] == [t.rstrip("\ufffd").strip() for t in alone]
    again = Row(model.backbone, encoded[0], torch.eye(3)[0], Sampling(max_new_tokens=20))
    list(batch.advance(deque([again])))
    assert batch.cache.length == short.room


def test_prompts_may_be_as_long_as_the_model_takes(tiny_run, says):
    """Training knew 128 tokens, the model takes 512: no word is lost in use, unless it is said."""
    model = load(tiny_run(), device="cpu")
    text = PROMPTS[3] * 5
    whole = model.backbone.prompts.encode_prompts([text], 10_000)[0]
    assert 128 < len(whole.ids) < 480 and len(whole.routed.ids) == 128
    answer = model.generate([text], max_new_tokens=8)[0]
    gates = model.experts.gates(model.route([text]), "sparse")
    expected = generate(model.backbone, [whole], 8, model.mixture, model.theta, gates)[0]
    assert (answer.text, answer.truncated) == (expected.rstrip("\ufffd").strip(), False)
    with pytest.warns(UserWarning, match="1 of 2 prompts lost their beginning: 504 tokens fit"):
        answers = model.generate([text, text * 5], max_new_tokens=8)
    assert [a.truncated for a in answers] == [False, True]


def test_a_prompt_with_several_answers_is_routed_once(model, monkeypatch):
    one, other = model.backbone.prompts.encode_prompts(PROMPTS[:2])
    expected, doubts = model.judge([one, other])
    read: list[int] = []

    def counted(backbone, prompts, *more):
        read.append(len(prompts))
        return compute_features(backbone, prompts, *more)

    monkeypatch.setattr("fedweave.inference.model.compute_features", counted)
    found, again = model.judge([one, one, other, one])
    assert read == [2] and again == [doubts[0], doubts[0], doubts[1], doubts[0]]
    torch.testing.assert_close(found, expected[[0, 0, 1, 0]])


def test_a_model_says_what_it_is(model):
    said = repr(model)
    assert said == f"<FedWeaveModel: 3 experts of rank 4 on {model.backbone.name}, float32 on cpu>"


def test_an_adapter_may_be_asked_for_by_name(model):
    """An expert, or none: the bare backbone, beside experts in the same batch."""
    encoded = model.backbone.prompts.encode_prompts(PROMPTS)
    bare = generate(model.backbone, encoded, 12)
    answers = model.generate(PROMPTS, adapter="base", max_new_tokens=12)
    assert [a.text for a in answers] == [t.rstrip("\ufffd").strip() for t in bare]
    assert {(a.expert, a.adapter) for a in answers} == {(-1, "base")}
    gates = torch.eye(3)[1].expand(len(PROMPTS), 3)
    second = generate(model.backbone, encoded, 12, model.mixture, model.theta, gates)
    answers = model.generate(PROMPTS, adapter="expert_1", max_new_tokens=12)
    assert [a.text for a in answers] == [t.rstrip("\ufffd").strip() for t in second]
    assert "".join(model.stream(PROMPTS[0], adapter="expert_1", max_new_tokens=12)) == answers[0].text
    with pytest.raises(
        UserError, match="there is no adapter 'shared'; there are expert_0, expert_1, expert_2, base"
    ):
        model.generate(PROMPTS, adapter="shared")


def test_rows_that_join_and_leave_change_nothing_for_the_others(model):
    """Prompts of different budgets squeezed through two rows, joining whenever one is free."""
    encoded = model.backbone.prompts.encode_prompts(PROMPTS)
    gates = sparsify(model.route(PROMPTS), "sparse")
    budgets = [3, 17, 1, 9, 12]
    rows = [
        Row(model.backbone, prompt, gate, Sampling(max_new_tokens=budget))
        for prompt, gate, budget in zip(encoded, gates, budgets, strict=True)
    ]
    batch, waiting = model.batch(2, max(row.room for row in rows)), deque(rows)
    pieces = {id(row): "" for row in rows}
    while waiting or not all(row.ended for row in batch.rows):
        for row, piece in batch.advance(waiting):
            pieces[id(row)] += piece
        assert len(batch.rows) <= 2
    for row, prompt, budget in zip(rows, PROMPTS, budgets, strict=True):
        alone = model.generate([prompt], max_new_tokens=budget)[0]
        assert (row.text.text, row.ended) == (alone.text, alone.ended)
        assert pieces[id(row)] == row.text.text


def test_fixed_sizes_and_spare_rows_change_nothing(model, monkeypatch):
    """The bookkeeping around a recorded step (recording itself needs CUDA): sizes are powers of two, rows leave."""
    plain = [a.text for a in model.generate(PROMPTS, max_new_tokens=12)]
    monkeypatch.setattr(record, "captured", lambda step: step)
    encoded = model.backbone.prompts.encode_prompts(PROMPTS)
    gates = sparsify(model.route(PROMPTS), "sparse")
    rows = [
        Row(model.backbone, p, g, Sampling(max_new_tokens=n))
        for p, g, n in zip(encoded, gates, [12, 3, 12, 7, 12], strict=True)
    ]
    batch, waiting = model.batch(5, 128), deque(rows)
    batch._recorded = {}
    while waiting or not all(row.ended for row in batch.rows):
        list(batch.advance(waiting))
    assert {(5, True)} < set(batch._recorded) <= {(n, True) for n in (5, 4, 2, 1)}  # an answer may end early
    assert [rows[i].text.text for i in (0, 2, 4)] == [plain[i] for i in (0, 2, 4)]


def test_a_dropped_row_makes_room(model):
    encoded = model.backbone.prompts.encode_prompts(PROMPTS[:2])
    gates = sparsify(model.route(PROMPTS[:2]), "sparse")
    first, second = (
        Row(model.backbone, p, g, Sampling(max_new_tokens=30)) for p, g in zip(encoded, gates, strict=True)
    )
    batch, waiting = model.batch(1, 128), deque([first, second])
    list(batch.advance(waiting))
    first.ended = "dropped"
    while waiting or not all(row.ended for row in batch.rows):
        list(batch.advance(waiting))
    assert second.text.text == model.generate(PROMPTS[1:2], max_new_tokens=30)[0].text


def test_a_stream_is_the_same_answer_in_pieces(model):
    answer = model.generate(PROMPTS[:1], max_new_tokens=16)[0]
    pieces = list(model.stream(PROMPTS[0], max_new_tokens=16))
    assert "".join(pieces) == answer.text == str(answer)
    assert len(pieces) > 1


def test_an_abandoned_stream_does_not_block_the_model(model):
    stream = model.stream(PROMPTS[0], max_new_tokens=16)
    next(stream)
    assert model.generate(PROMPTS[:1], max_new_tokens=2)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 8, "repetition_penalty": 1.3},
        {"do_sample": True, "top_k": 1, "temperature": 0.5},
    ],
)
def test_options_act_as_in_transformers(model, options):
    """Options whose outcome is certain, against transformers' own generation."""
    encoded = model.backbone.prompts.encode_prompts(PROMPTS)
    weights = model.mixture.layout.views(model.theta[None])
    gates = sparsify(model.route(PROMPTS), "sparse")
    ours = model.generate(PROMPTS, max_new_tokens=16, **options)
    for prompt, gate, answer in zip(encoded, gates, ours, strict=True):
        ids = torch.from_numpy(prompt.ids).long()[None]
        config = GenerationConfig(max_new_tokens=16, eos_token_id=model.backbone.end_ids, pad_token_id=0, **options)
        with model.backbone.decoding() as plain, model.mixture.active(weights, gate[None, None]):
            out = plain.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        text = model.backbone.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer.text == text.rstrip("\ufffd").strip()


def test_draws_follow_the_distribution(model):
    """First tokens of many draws against the softmax of the logits, by total variation."""
    encoded = model.backbone.prompts.encode_prompts(PROMPTS[:1])
    draws, gate = 400, sparsify(model.route(PROMPTS[:1]), "sparse")[0]
    sampling = Sampling.of({"do_sample": True, "temperature": 0.7, "top_k": 3, "seed": 1, "max_new_tokens": 1})
    rows = [Row(model.backbone, encoded[0], gate, sampling, number) for number in range(draws)]
    batch, waiting = model.batch(draws, 128), deque(rows)
    batch.prefill = 10**6
    logits = batch._read(batch._choose(waiting))[0]
    counts = torch.zeros(len(logits))
    for row in rows:
        counts[row.chooser.choose(logits, [])] += 1
    top = logits.topk(3)
    expected = torch.zeros(len(logits)).index_copy(0, top.indices, (top.values / 0.7).softmax(-1))
    assert (counts / draws - expected).abs().sum() / 2 < 0.08
    assert (counts > 0).sum() > 1


def test_a_seed_repeats_an_answer_whatever_is_beside_it(model):
    options = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 12, "seed": 3}
    together = model.generate([PROMPTS[0]] * 3, **options)
    assert together[0].text == model.generate([PROMPTS[0]], **options)[0].text
    assert len({a.text for a in together}) > 1, "prompts that share a seed must still differ"
    assert together[0].text != model.generate([PROMPTS[0]], **{**options, "seed": 4})[0].text


def test_stop_strings_end_an_answer(model):
    free = model.generate(PROMPTS[:1], max_new_tokens=24)[0].text
    stop = free[4:6]
    answer = model.generate(PROMPTS[:1], max_new_tokens=24, stop_strings=[stop])[0]
    assert answer.text == free[: free.index(stop)].strip() and answer.ended == "stop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "unknown generation option 'num_beams'"),
        ({"temprature": 0.5}, "did you mean 'temperature'"),
        ({"temperature": 0.5}, "add do_sample=True"),
        ({"do_sample": True, "temperature": 0}, "temperature must be between"),
        ({"do_sample": True, "top_p": 1.5}, "top_p must be between"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"stop_strings": [""]}, "empty"),
        ({"routing": "bottom2"}, "use sparse, soft, or topK"),
        ({"routing": "top0"}, "use sparse, soft, or topK"),
    ],
)
def test_wrong_options_are_one_sentence(model, options, message):
    with pytest.raises(UserError, match=message) as caught:
        model.generate(PROMPTS[:1], **options)
    assert "\n" not in str(caught.value)


def test_a_lone_text_and_no_prompt(model):
    with pytest.raises(UserError, match="must be a list"):
        model.generate("How many?")
    assert model.generate([]) == []
