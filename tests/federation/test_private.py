"""Differential privacy at the one exit: every tensor of every question is clipped and noised, every figure is a
constant, known or noised, and what is spent is neither lost nor repeated."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fedweave.cli import main
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.compute import Compute
from fedweave.federation.evaluate import Evaluate
from fedweave.federation.exit import filters
from fedweave.federation.message import Message
from fedweave.federation.private import Noise, privacy_figures
from fedweave.federation.rounds import one_round
from fedweave.federation.site.ledger import Ledger
from fedweave.federation.site.rehearsal import RehearsalEngine
from fedweave.federation.site.settings import Floors, SiteConfig
from fedweave.federation.site.site import Models, Site
from fedweave.federation.site.source import OwnFiles
from fedweave.federation.state import broadcast
from fedweave.federation.steps import Answer, Asked
from fedweave.methods import build_method
from fedweave.privacy.budget import Budget, planned
from tests.federation.flower.conftest import Federation, models  # noqa: F401 - a fixture
from tests.federations import changed, make_engine, run
from tests.helpers import events, read_json

pytest.importorskip("dp_accounting", reason="pip install 'fedweave[privacy]'")

CLIP = 0.5


def private(config, level="client", **sections):
    chosen = {"max_buckets": 1, "sketch": 16, **sections.pop("discovery", {})}
    return changed(config, privacy={"level": level, "clip": CLIP}, discovery=chosen, **sections)


def sent(config, backbone, monkeypatch=None, noise=None, change=lambda client: None):
    """{question: [(what was asked, message)]} of a whole federation; with another noise than the budget's."""
    if noise is not None:
        monkeypatch.setattr(Budget, "noise", lambda self, step, examples=0: noise)
    engine, method, seen = make_engine(config, backbone), build_method(config), defaultdict(list)
    real = engine.answers

    def spy(step, asked, question):
        for one, (client, message) in zip(asked, real(step, asked, question), strict=True):
            seen[step.name].append((step, one, message))
            yield client, message

    engine.answers = spy
    for client in engine.members:
        client.held = client.data
        change(client)
    state = method.prepare(engine)
    question = broadcast(state, 0)
    for step in (method.train, method.evaluate):  # the same state, however noisy the rest was
        assert len(list(engine.ask(step, engine.members, question))) == len(engine.members), step.name
    engine.detach()
    return seen


def moved(step, asked, message):
    """An answer as one vector, from where it started."""
    parts = step.parts(asked, message.facts)
    vectors = [message.tensors[k].double() - (0 if p.origin is None else p.origin) for k, p in parts.items()]
    return torch.cat([vector.flatten() for vector in vectors]) if vectors else torch.zeros(0)


def test_off_nothing_is_in_the_way(config):
    assert filters(config) == [] and len(filters(private(config))) == 1


def test_whatever_a_client_sends_in_a_step_is_no_longer_than_the_clip(config, backbone, monkeypatch):
    seen = sent(private(config), backbone, monkeypatch, noise=0.0)
    assert seen.keys() == {"discover", "start", "warm", "train", "evaluate"}
    for name, answers in seen.items():
        norms = [float(moved(*one).norm()) for one in answers]
        assert all(norm <= CLIP * 1.001 for norm in norms), name  # signatures travel in half precision
        assert name == "evaluate" or max(norms) > 0
    assert max(float(moved(*one).norm()) for one in seen["discover"]) == pytest.approx(CLIP, rel=1e-3)


def test_noise_at_the_exit_is_as_large_as_solved_in_every_question(config, backbone, monkeypatch):
    """Noise that drowns everything else, so that what leaves is its own deviation; and the same for each number."""
    noise = 1e4
    seen = sent(private(config), backbone, monkeypatch, noise)
    for name in ("discover", "start", "warm", "train"):
        for one in seen[name]:
            vector = moved(*one)
            assert vector.std().item() == pytest.approx(noise * CLIP, rel=0.2 if name == "discover" else 0.03), name
            for part in one[2].tensors.values():
                if part.numel() > 500:
                    assert part.double().std().item() == pytest.approx(noise * CLIP, rel=0.15), name
    flat = torch.stack([moved(*one)[:64] for name in ("start", "warm") for one in seen[name]])
    assert (torch.corrcoef(flat) - torch.eye(len(flat))).abs().max() < 0.6, "no noise is used twice"


def test_an_evaluation_sum_is_noised_by_the_budget(config):
    config = private(config)
    step, filtered = Evaluate(build_method(config)), Noise(config)
    client = type("Client", (), {"index": 0, "secret": 0})()
    asked = Asked(client, Message(facts={"t": 0}), {}, 1)
    told = []
    for secret in range(2000):
        client.secret = secret
        answer = filtered(step, asked, client, Answer(figures={"total": 1e6, "entropy": 3.0, "count": 9}))
        told.append(answer.figures["total"])
        assert answer.figures["entropy"] == 0.0 and answer.figures["count"] == 1
    spread = step.figures(asked)["total"].spread
    assert torch.tensor(told).double().std().item() == pytest.approx(
        Budget(config).noise("evaluate") * spread, rel=0.05
    )


def test_of_two_federations_that_differ_by_a_clients_data_no_figure_tells_which(config, backbone, monkeypatch):
    def other(client):
        """The same client with half of its examples, in another order."""
        if client.index == 0:
            kept = list(reversed(range(len(client.data) // 2)))
            examples = [client.data.examples[i] for i in kept]
            client.data = replace(client.data, examples=examples, features=client.data.features[kept])

    config = private(config, alignment={"max_experts": 1})  # so that what follows alignment is the same
    ones, others = (
        sent(config, backbone, monkeypatch, noise=0.0, change=how) for how in (lambda client: None, other)
    )
    for name in ones:
        for (_, _, a), (_, _, b) in zip(ones[name], others[name], strict=True):
            facts = [{k: v for k, v in m.facts.items() if k != "total"} for m in (a, b)]
            assert facts[0] == facts[1], name
            assert a.tensors.keys() == b.tensors.keys()
    gap = moved(*ones["train"][0]) - moved(*others["train"][0])
    assert 0 < gap.norm() <= 2 * CLIP


def test_examples_level_tells_how_many_examples_there_are_and_nothing_else(config, backbone):
    seen = sent(private(config, "example"), backbone)
    for step, asked, message in [one for answers in seen.values() for one in answers]:
        own = len(asked.member)
        for name, figure in step.figures(asked).items():
            fact = message.facts[name]
            assert figure.veil is None or fact == figure.veil
            if figure.examples and name != "count":
                assert set(fact if isinstance(fact, list) else [fact]) <= {0, own}
    assert all(message.facts["losses"] == [] for _, _, message in seen["train"])


def test_an_examples_signature_is_no_longer_than_the_clip_and_the_sum_has_its_noise(config, backbone, monkeypatch):
    """A client with one example more or less: what it signs, times how many it has, moves by no more than that."""

    def signed(noise, count):
        def shorten(client):
            rows = range(len(client.data) if client.index else count)
            data = client.data
            client.data = replace(
                data, examples=[data.examples[i] for i in rows], features=data.features[: len(rows)]
            )

        config_ = private(config, "example", experts={"dropout": 0.0})
        monkeypatch.setattr(Budget, "noise", lambda self, step, examples=0: noise)
        engine, method = make_engine(config_, backbone), build_method(config_)
        for client in engine.members:
            shorten(client)
        ((_, told), *_) = engine.ask(method.discover, engine.members, Message())
        engine.detach()
        return told.signatures[0].double() * count

    sums = [signed(0.0, count) for count in (7, 8, 9)]
    for a, b in pairwise(sums):
        assert 0 < (a - b).norm() <= CLIP * 1.02  # half precision
    noise = signed(1e3, 8) - sums[1]
    assert noise.std().item() == pytest.approx(1e3 * CLIP, rel=0.2)


def test_an_example_that_diverges_is_heard_of_by_nobody(config, backbone, monkeypatch):
    """Its gradient counts nothing in a signature, and its loss as much as the largest."""
    real = Compute.gradients, Compute.losses

    def gradients(compute, layout, lane):
        for some in real[0](compute, layout, lane):
            some[0] = torch.nan
            yield some

    def losses(compute, *asked):
        return torch.where(torch.arange(len(asked[2])) > 0, real[1](compute, *asked), torch.nan)

    monkeypatch.setattr(Compute, "gradients", gradients)
    monkeypatch.setattr(Compute, "losses", losses)
    for level in ("example", "client"):
        for _, _, message in [
            one for answers in sent(private(config, level), backbone).values() for one in answers
        ]:
            assert all(torch.isfinite(tensor.double()).all() for tensor in message.tensors.values())
            assert math.isfinite(message.facts.get("total", 0.0))


@pytest.mark.usefixtures("smooth_optimiser")
@pytest.mark.parametrize("level", ["client", "example"])
@pytest.mark.parametrize("method", ["fedweave", "ffa-lora"])
def test_flower_and_one_process_add_the_same_noise(level, method, config, backbone, models):  # noqa: F811
    config = private(config, level, method=method, training={"rounds": 2}, federation={"patience": 5.0})
    engine = make_engine(config, backbone)
    _, expected = run(config, engine)
    federation = Federation(config, models)
    _, final, reports = federation.run()
    assert all(len(report.receipts.accepted) == 3 for report in reports) and "warning" not in federation.said
    assert (final.theta - expected.theta).abs().max() <= 1e-5
    here, there = (privacy_figures(config, e.members, e.answered) for e in (engine, federation.engine))
    assert here == there and 0 < here["spent"] <= config.privacy.epsilon * 1.001


def test_no_round_repeats_the_noise_of_another(config, backbone, monkeypatch):
    config = private(config)
    monkeypatch.setattr(Budget, "noise", lambda self, step, examples=0: 1e4)
    engine, method = make_engine(config, backbone), build_method(config)
    state = method.prepare(engine)
    moves = [one_round(method, engine, state, engine.members, t)[0].theta - state.theta for t in (0, 1, 1)]
    assert torch.equal(moves[1], moves[2]), "a simulation gives the same again"
    assert torch.cosine_similarity(moves[0], moves[1], dim=0).abs() < 0.1


@pytest.mark.parametrize("level", ["client", "example"])
def test_a_resumed_run_is_the_same_run_and_has_spent_the_same(level, tiny_run, tiny_copy, complains):
    overrides = [f"privacy.level={level}", "discovery.max_buckets=1", "discovery.sketch=8"]
    whole, folder = tiny_run(*overrides), tiny_copy(*overrides)
    assert main(["resume", str(folder), "--checkpoint", "2", "--quiet"]) == 0
    assert events(folder, "round") == events(whole, "round")
    spent = [event["epsilon"] for event in events(whole, "round")]
    assert spent == sorted(spent) and 0 < spent[-1] <= 8.001 and events(whole, "round")[0]["train_loss"] is None
    again, before = read_json(folder / "summary.json"), read_json(whole / "summary.json")
    assert again["privacy"] == before["privacy"] and again["privacy"]["spent"] == spent[-1]
    assert again["test"]["best"]["loss"] == before["test"]["best"]["loss"]
    assert "keeps its rounds" in complains("resume", folder, "training.rounds=9")


def test_card_report_and_last_lines_say_what_was_spent(tiny_run, tmp_path):
    folder = tiny_run("privacy.level=example", "discovery.max_buckets=1", "discovery.sketch=8")
    spent = read_json(folder / "summary.json")["privacy"]["spent"]
    assert main(["export", str(folder), str(tmp_path / "bundle")]) == 0
    card = (tmp_path / "bundle" / "README.md").read_text()
    assert f"ε = 8 at δ = 1e-05 over all steps together, of which ε = {spent:.2f} was spent" in card
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert f"{spent:.2f} spent" in (tmp_path / "page.html").read_text()


# -------------------------------------------------------------------------------------- a site's own ledger


def test_a_site_counts_its_answers_over_restarts_and_stops_at_what_was_agreed(config, tmp_path):
    config, path = private(config, training={"rounds": 2}), tmp_path / "privacy.json"
    for _ in range(2):
        Ledger(path).spend("f", config, "train", Floors(epsilon=100.0))  # as if started anew in between
    assert json.loads(path.read_text())["f"]["answers"] == {"train": 2}
    with pytest.raises(UserError, match="its privacy budget is spent: 'train'"):
        Ledger(path).spend("f", config, "train", Floors(epsilon=100.0))
    with pytest.raises(UserError, match="changed what its noise follows from"):
        Ledger(path).spend("f", private(config, "example", training={"rounds": 9}), "train", Floors(epsilon=100.0))
    with pytest.raises(UserError, match=r"more of its privacy than floors\.epsilon=10"):
        Ledger(path).spend("another", config, "train", Floors(epsilon=10.0))
    Ledger(path).spend("another", config, "train", Floors(epsilon=16.0))
    assert planned(config)["train"] == 2


def test_nobody_else_knows_the_noise_of_a_site_and_it_stops_when_its_budget_is_spent(
    config, tmp_path, model_folder
):
    """The same question twice: a simulation would answer the same."""
    rows = [json.dumps({"prompt": f"Say {n}.", "response": str(n)}) for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    settings = SiteConfig("clinic", str(tmp_path / "rows.jsonl"), state=str(tmp_path / "state"))
    settings = replace(settings, backbone=replace(settings.backbone, model=str(model_folder("llama"))))
    config = private(config, method="fedit", training={"rounds": 2})
    site, method = Site(OwnFiles(settings), Models(), build_method, Console(quiet=True)), build_method(config)
    engine = RehearsalEngine(site, config)
    state = method.prepare(engine)
    question = broadcast(state, 0)
    answers = []
    for _ in range(2):
        list(engine.ask(method.train, engine.members, question))
        answers.append(engine.sent["train"].tensors["expert.0"])
    noise = (answers[0] - answers[1]) / 2**0.5
    assert noise.std().item() == pytest.approx(CLIP * Budget(config).noise("train"), rel=0.05)
    with pytest.raises(UserError, match="privacy budget is spent"):
        list(engine.ask(method.train, engine.members, question))


def test_a_question_that_no_plan_has_is_not_answered(config, tmp_path):
    with pytest.raises(UserError, match="its privacy budget is spent: 'warm'"):
        Ledger(None).spend("f", private(config, router={"warm_start": {"enabled": False}}), "warm", Floors())
