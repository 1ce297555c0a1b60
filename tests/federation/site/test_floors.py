"""What no server can get a site to do, and what of its troubles a server hears."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedweave.config import dump_config
from fedweave.errors import UserError
from fedweave.federation.message import Message
from fedweave.federation.site.floors import Declined, check_buckets, check_question
from fedweave.federation.site.ledger import Ledger, Sums, largest_part
from fedweave.federation.site.settings import Floors, SiteConfig
from fedweave.federation.site.site import Models, Site
from fedweave.federation.site.source import OwnFiles
from fedweave.federation.state import ServerState, broadcast, router_facts
from fedweave.methods import build_method
from fedweave.router.mlp import RouterLayout
from tests.federations import changed


def question(config, step: str = "train", t: int = 0) -> Message:
    return Message(facts={"step": step, "t": t, "config": dump_config(config), "index": 0, "federation": "f",
                          "sizes": [], "assignment": []})  # fmt: skip


@pytest.mark.parametrize(
    ("floors", "settings", "step", "words"),
    [
        (Floors(batch=4), {"training": {"batch_size": 3}}, "train", "asks for 3, where this site's floors.batch"),
        (Floors(batch=4), {"discovery": {"warmup_batch": 1}}, "discover", "floors.batch is 4"),
        (Floors(steps=5), {"training": {"local_steps": 1}}, "train", "floors.steps is 5"),
        (Floors(clip=0.1), {"training": {"clip": 1e-9}}, "train", "asks for 1e-09, where this site's floors.clip"),
        (Floors(questions=("hello", "train")), {}, "moments", "does not answer 'moments'"),
        (Floors(batch=4), {"router": {"warm_start": {"batch_size": 1}}}, "warm", "floors.batch is 4"),
        (Floors(steps=5), {"router": {"warm_start": {"steps": 1}}}, "warm", "floors.steps is 5"),
        (Floors(steps=3), {"router": {"warm_start": {"steps": 8}}}, "rewarm", "asks for 2, where"),
        (Floors(secure=True), {}, "train", "no secure aggregation, which this site's floors.secure asks for"),
        (Floors(level="example"), {}, "discover", "privacy.level is none, this site's floors.level example"),
        (
            Floors(), {"privacy": {"level": "client", "delta": 0.1}, "discovery": {"max_buckets": 1, "sketch": 4}},
            "train", "privacy.delta is 0.1, this site's floors.delta 1e-05",
        ),
    ],
)  # fmt: skip
def test_a_question_below_a_floor_is_refused(floors, settings, step, words, config):
    with pytest.raises(UserError) as refusal:
        check_question(floors, changed(config, **settings), question(config, step, t=1))
    assert words in str(refusal.value)
    check_question(Floors(batch=1, clip=0.0, delta=1.0), changed(config, **settings), question(config, step))


def test_a_bucket_below_the_floor_is_not_signed():
    check_buckets(Floors(bucket=3), [3, 9])
    for floors in (Floors(bucket=4), Floors(batch=4)):
        with pytest.raises(UserError, match=r"smaller than this site's floors\.bucket or floors\.batch, 4"):
            check_buckets(floors, [3, 9])


def test_a_question_is_answered_so_often_by_all_federations_together_and_no_oftener(config, tmp_path):
    """A server can say that it is always round 1, and that it is another federation."""
    path, floors = tmp_path / "privacy.json", Floors(rounds=3)
    for federation in ("a", "b", "b"):
        Ledger(path).spend(federation, config, "train", floors)  # as if started anew in between
    with pytest.raises(UserError, match=r"answers 'train' 3 times at most \(floors\.rounds\)"):
        Ledger(path).spend("c", config, "train", floors)
    Ledger(path).spend("c", config, "evaluate", floors)


@pytest.fixture
def site(tmp_path, model_folder, console):
    """A real site whose first row is a secret that no encoder can use."""

    def make(*rows: str, floors: Floors | None = None) -> Site:
        rows = rows or ('{"prompt": {"patient": "Smith"}, "response": "x"}',)
        (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows))
        settings = SiteConfig(
            name="clinic",
            data=str(tmp_path / "rows.jsonl"),
            state=str(tmp_path / "state"),
            floors=floors or Floors(),
        )
        own = dataclasses.replace(settings.backbone, model=str(model_folder("llama")))
        return Site(OwnFiles(dataclasses.replace(settings, backbone=own)), Models(), build_method, console)

    return make


@pytest.fixture
def console():
    from fedweave.console import Console

    console = Console(quiet=True)
    console.said = []
    console.warn = console.said.append
    return console


def test_an_error_that_travels_says_nothing_of_the_site(site, config, console):
    told = site().answer(question(config, "discover")).facts["error"]
    assert told == "UserError; the site's own log says more"
    assert "Smith" in console.said[0] and "rows.jsonl:1" in console.said[0], "its own log says everything"


def test_a_site_with_another_model_in_mind_answers_nothing(site, config):
    wary = site(floors=Floors(fingerprint="another"))
    for step in ("hello", "discover"):
        told = wary.answer(question(config, step)).facts["error"]
        assert "Smith" not in told
    assert "not the one of this site's floors.fingerprint" in wary.answer(question(config, "hello")).facts["error"]


# -------------------------------------------------------------------------------------- a hostile server

ROWS = [json.dumps({"prompt": f"{'Add' if n % 2 else 'Spell'} {n}.", "response": str(n)}) for n in range(12)]


def asked_to_train(site, config, experts: int = 2, **facts):
    """The answer to a round's question about a model of the server's own making."""
    engine = site.session.engine
    layout = engine.layout(config.experts.rank, experts)
    router = RouterLayout(engine.width, config.router.hidden, experts, config.router.features)
    state = ServerState(layout, router, layout.initial(0), router.initial(1)[None])
    told, put = question(config), broadcast(state, 0)
    return site.answer(Message(put.tensors, {**put.facts, **told.facts, **facts}))


def test_the_warm_start_of_one_example_would_be_its_feature(site, config):
    """φ is the server's: with tiny weights AdamW's step is the gradient, an outer product with a feature."""
    config = changed(config, discovery={"max_buckets": 1}, router={"warm_start": {"batch_size": 1, "steps": 1}})
    rows = {}
    for floors in (Floors(), Floors(batch=1)):
        victim = site(*ROWS, floors=floors)
        sizes = victim.answer(
            question(changed(config, router={"warm_start": {"batch_size": 8}}), "discover")
        ).facts["sizes"]
        router = RouterLayout(victim.session.engine.width, config.router.hidden, 2, config.router.features)
        facts = {**question(config, "warm").facts, "sizes": sizes, "assignment": [0], "contrast": "all"}
        answer = victim.answer(Message({"phi": router.initial(0) * 1e-10}, facts | router_facts(router)))
        rows[floors] = answer.tensors.get("router")
    assert rows[Floors()] is None
    taken = router.views(rows[Floors(batch=1)])["linear1.weight"]  # [h, d]
    features = router.inputs(victim.session.client.data.features)
    assert torch.cosine_similarity(taken[:1], features).abs().max() > 0.9999, "without the floor it is"


def test_who_names_the_experts_of_buckets_does_not_get_round_their_floor(site, config):
    config = changed(config, discovery={"max_buckets": 1}, training={"local_steps": 1})
    wary = site(*ROWS, floors=Floors(bucket=50))
    assert "smaller than this site's floors.bucket" in wary.answer(question(config, "discover")).facts["error"]
    told = asked_to_train(wary, config, sizes=[len(wary.session.client.data)], assignment=[0])
    assert not told.tensors and "smaller than this site's floors.bucket" in told.facts["error"]


def test_small_buckets_join_the_nearest(site, config):
    config = changed(config, discovery={"max_buckets": 8})
    sizes = [
        site(*ROWS, floors=Floors(bucket=n)).answer(question(config, "discover")).facts["sizes"] for n in (1, 6)
    ]
    assert len(sizes[0]) > len(sizes[1]) >= 1 and min(sizes[1]) >= 6 and sum(sizes[0]) == sum(sizes[1])


def test_copies_of_a_row_count_once(site, config):
    """What rests on five copies of one row tells that row."""
    config = changed(config, discovery={"max_buckets": 8})
    alone = '{"prompt": "Smith has a rash on both of her hands and a fever since Monday.", "response": "x"}'
    told = site(*ROWS, *[alone] * 5, floors=Floors(batch=1)).answer(question(config, "discover")).facts["sizes"]
    assert 5 in told or 4 in told, "without a floor they are a bucket (one copy may be held out)"
    wary = site(*ROWS, *[alone] * 5, floors=Floors(bucket=3))
    assert sum(wary.answer(question(config, "discover")).facts["sizes"]) == sum(told)
    client = wary.session.client
    assert all(client.data.distinct(bucket) >= 3 for bucket in client.buckets)
    keys = [example.key for example in client.data.examples]
    copies = np.array([i for i, key in enumerate(keys) if keys.count(key) > 1])
    assert len(copies) >= 3 and not client.enough(copies)
    client.buckets = [copies]
    client.let_go()
    assert not len(client.buckets[0]) and len(client.waiting) == len(copies), "they wait for rows of their kind"
    only = site(*[alone] * 9, floors=Floors(bucket=3)).answer(question(config, "discover"))
    assert "smaller than this site's floors.bucket" in only.facts["error"]


def test_an_expert_of_fewer_examples_than_the_floor_is_not_sent(site, config):
    """Where the router labels single examples, a router of the server's own making would pick one of them."""
    config = changed(
        config,
        discovery={"max_buckets": 1},
        experts={"labels": "router", "shared_rank": 8},
        training={"local_steps": 4},
    )
    for floors, sent in ((Floors(batch=1), [1, 10]), (Floors(bucket=2), [0, 10])):
        victim = site(*ROWS, floors=floors)
        victim.answer(question(config, "discover"))
        client, method = victim.session.client, victim.session.method
        client.assignment = [0]
        method.labels = lambda client, state: torch.tensor([0, *[1] * 10])  # as such a router would
        state = SimpleNamespace(layout=SimpleNamespace(experts=2))
        assert method.counts(client, state).tolist() == sent
        assert all(len(pool) >= floors.least for pool in method.pools(client, state))


WORDS = ("Do", "Now", "Then", "Please", "Also", "First")


def test_two_sums_of_features_do_not_differ_by_one_prompt(site, config):
    """The server says how many rows are kept back, and to which federation a question belongs."""
    config = changed(config, discovery={"max_buckets": 1}, experts={"shared_rank": 8}, router={"familiar": 0.9})
    told = []
    for name, holdout in (("first", 0.0), ("again", 0.0), ("another", 0.03), ("half", 0.4)):
        victim = site(*(row.replace('prompt": "', f'prompt": "{word} ') for word in WORDS for row in ROWS))
        asked = changed(config, data={"holdout": holdout})
        facts = {**question(asked, "discover").facts, "federation": name}
        facts["sizes"] = victim.answer(Message(facts=facts)).facts["sizes"]
        told.append(victim.answer(Message(facts=facts | {"step": "moments", "assignment": [0]})).facts)
    assert [facts.get("samples", facts.get("error")) for facts in told] == [
        72, 72, "this sum and earlier ones together would tell of fewer than 5 rows", 44,
    ]  # fmt: skip


def test_a_sum_of_one_prompt_many_times_tells_its_feature():
    sums, halves = Sums(None), [slice(0, None, 2), slice(1, None, 2)]
    rows = [b"%d" % i for i in range(12)]
    with pytest.raises(Declined, match="fewer than 5 rows"):
        sums.tell([b"the same"] * 12, halves)
    with pytest.raises(Declined, match="fewer than 5 rows"):
        sums.tell([*rows, *[b"the same"] * 8], halves)
    sums.tell(rows, halves)
    sums.tell(rows[::-1], halves)  # the same two sums
    assert len(sums.told) == 2 and not {"the same"} & {name for own in sums.told for name in own}
    assert largest_part([["a", "a", "b"]]) == largest_part([["a", "a.1", "b"]]) == pytest.approx(0.8)


def test_no_number_of_sums_tells_a_feature(site, config):
    """Each lacks a dozen other rows, by the seed, which is the server's: equations enough for every row of them."""
    config = changed(
        config,
        discovery={"max_buckets": 1},
        experts={"shared_rank": 8},
        router={"familiar": 0.9},
        data={"holdout": 0.2},
    )
    victim = site(*(row.replace('prompt": "', f'prompt": "{word} ') for word in WORDS for row in ROWS))
    prompts, equations = {}, []
    for seed in range(60):
        facts = {**question(changed(config, seed=seed), "discover").facts, "federation": f"seed {seed}"}
        facts["sizes"] = victim.answer(Message(facts=facts)).facts["sizes"]
        told = victim.answer(Message(facts=facts | {"step": "moments", "assignment": [0]}))
        client = victim.session.client
        rows = [client.data.examples[i].prompt.ids.tobytes() for i in client.rows]
        if "sums" in told.tensors:
            for part in (rows[::2], rows[1::2]):
                row = torch.zeros(len(WORDS) * len(ROWS), dtype=torch.float64)
                row[[prompts.setdefault(prompt, len(prompts)) for prompt in part]] = 1.0
                equations.append(row)
    known = torch.stack(equations)
    found = (torch.linalg.pinv(known) @ known).diagonal()  # 1: this row's feature follows
    assert 0 < len(equations) < 120 and found.max() < 0.5


def test_few_rows_say_nothing_of_how_far_out_they_lie(site, config):
    config = changed(config, discovery={"max_buckets": 1}, experts={"shared_rank": 8}, router={"familiar": 0.9})
    victim = site(*ROWS[:9])
    facts = question(config, "discover").facts
    facts["sizes"] = victim.answer(Message(facts=facts)).facts["sizes"]
    d = victim.session.engine.width
    spans = {"mean": torch.zeros(2, d), "scale": torch.eye(d)[:1].repeat(2, 1), "axes": torch.zeros(2, 1, d)}
    asked = facts | {"step": "distances", "assignment": [0], "mean_far": [1.0, 1.0]}
    assert not any(victim.answer(Message(spans, asked)).facts["counts"])


def test_a_question_that_cannot_be_opened_does_not_stop_a_site(site, console):
    def broken():
        raise TypeError("can't convert np.ndarray of type numpy.str_")

    assert site().answer(broken).facts == {"error": "TypeError; the site's own log says more"}
    assert site().answer(Message(facts={})).facts == {"error": "KeyError; the site's own log says more"}
