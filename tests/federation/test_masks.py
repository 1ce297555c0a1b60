"""Secure aggregation in whole federations: the same model, of sums alone, whichever clients drop out."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fedweave.cli import main
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.admission import Receipts
from fedweave.federation.evaluate import Loss
from fedweave.federation.masks import MASKED, NAMES
from fedweave.federation.private import privacy_figures
from fedweave.federation.rounds import federate, one_round
from fedweave.federation.site.rehearsal import check_site
from fedweave.federation.site.settings import Floors, SiteConfig
from fedweave.federation.state import broadcast
from fedweave.methods import build_method
from fedweave.privacy.budget import Budget
from fedweave.privacy.masking import FRACTION, threshold
from tests.federation.flower.conftest import Federation, models  # noqa: F401 - a fixture
from tests.federations import changed, make_engine, run
from tests.helpers import events

pytest.importorskip("cryptography", reason="pip install 'fedweave[privacy]'")
pytestmark = pytest.mark.usefixtures("smooth_optimiser")


def masked(config, on=True, **sections):
    chosen = {"secure_aggregation": on, "rule": "mean", "patience": 5.0, "deadline": 5.0}
    sections.setdefault("data", {"clients": 5})
    sections.setdefault("training", {"rounds": 2})
    return changed(config, federation={**chosen, **sections.pop("federation", {})}, **sections)


def evaluated(engine, method, state) -> Loss:
    """Of all clients' validation examples."""
    told = [loss for _, loss in engine.ask(method.evaluate, engine.members, broadcast(state, 9))]
    return sum(told, Loss())


def travelling(engine):
    """Its answers leave the process, and so they are masked."""
    engine.travels = engine.exit.travels = True
    return engine


@pytest.mark.parametrize("level", ["none", "client"])
def test_a_simulation_has_the_same_sums_to_the_bit_without_masks(level, config, backbone, monkeypatch):
    config = masked(config, privacy={"level": level}, discovery={"max_buckets": 1, "sketch": 4})
    _, expected = run(config, travelling(make_engine(config, backbone)))
    monkeypatch.setattr("fedweave.privacy.masking.mask", None)  # whoever wants a mask has none
    _, found = run(config, make_engine(config, backbone))
    assert torch.equal(found.theta, expected.theta) and torch.equal(found.phi, expected.phi)


@pytest.mark.parametrize("method", ["fedweave", "without-prototype-expert", "rolora", "fedsvd"])
def test_the_server_gets_the_same_model_from_sums(method, config, backbone):
    ends = []
    for on in (False, True):
        chosen = masked(config, on, method=method)
        engine = travelling(make_engine(chosen, backbone))
        for client in engine.members:
            client.held = client.data
        start, end = run(chosen, engine)
        ends.append((start, end, evaluated(engine, build_method(chosen), end)))
        engine.detach()
    (start, end, loss), (masked_start, masked_end, masked_loss) = ends
    assert start.layout == masked_start.layout
    for a, b in ((start, masked_start), (end, masked_end)):
        assert (a.theta - b.theta).abs().max() <= 1e-5
        assert a.phi is None or (a.phi - b.phi).abs().max() <= 1e-5
    assert (loss.total, loss.count) == (pytest.approx(masked_loss.total, rel=1e-4), masked_loss.count)


def test_familiar_prompts_are_learned_from_sums(config, backbone):
    chosen = {"router": {"familiar": 0.9}, "experts": {"shared_rank": 8}, "training": {"rounds": 0}}
    ends = [run(c, make_engine(c, backbone))[1] for c in (masked(config, on, **chosen) for on in (False, True))]
    assert ends[0].router == ends[1].router and ends[0].router.axes
    views = [end.router.views(end.phi[0]) for end in ends]
    assert torch.allclose(views[0]["familiar.mean"], views[1]["familiar.mean"], atol=1e-5)
    assert torch.allclose(views[0]["familiar.limit"], views[1]["familiar.limit"], rtol=1e-2)


def test_over_flower_nothing_but_masked_numbers_leaves_a_site(config, backbone, models):  # noqa: F811
    config = masked(config)
    _, expected = run(config, make_engine(config, backbone))
    federation = Federation(config, models)
    _, final, reports = federation.run()
    assert all(len(report.receipts.accepted) == 5 for report in reports) and "warning" not in federation.said
    assert (final.theta - expected.theta).abs().max() <= 1e-5 and (final.phi - expected.phi).abs().max() <= 1e-5
    seen = set()
    for way, _, message in federation.grid.sent:
        if way == "up" and (step := message.facts["step"]) not in ("hello", "discover", *NAMES):
            seen.add(step)
            assert message.tensors.keys() == {MASKED} and message.tensors[MASKED].dtype == torch.int64
            assert message.facts.keys() == {"step", "t", "backbone", "tokenizer"}
            spread = message.tensors[MASKED].double().std() / 2**63
            assert 0.4 < spread < 0.7 or message.tensors[MASKED].numel() < 100, "uniform numbers, not small ones"
    assert seen == {"start", "warm", "moments", "distances", "train"}


DROPS = {"train": "answering", "shares": "sharing", "unmask": "the last word", "keys": "keys"}


@pytest.mark.parametrize("step", DROPS, ids=DROPS.values())
def test_a_site_that_drops_out_anywhere_costs_its_own_answer(step, config, backbone, models):  # noqa: F811
    config = masked(config, data={"clients": 6}, training={"rounds": 1})
    federation = Federation(config, models)
    federation.engine.enrol(6)
    method = build_method(config)
    state = method.prepare(federation.engine)
    federation.grid.fate = lambda asked, node, t: "dies" if asked == step and node == 102 else "answers"
    moved, report = one_round(method, federation.engine, state, federation.engine.members, 0)
    local, plain = make_engine(masked(config, on=False, data={"clients": 6}), backbone), build_method(config)
    plain.prepare(local)
    left = [c for c in local.members if c.index != 2 or step == "unmask"]  # by then its answer is in the sum
    expected, _ = one_round(plain, local, state, left, 0)
    assert (moved.theta - expected.theta).abs().max() <= 1e-5 < (moved.theta - state.theta).abs().max()
    assert len(report.receipts.accepted) == len(left)


def test_too_few_answers_leave_the_sum_closed_and_the_model_where_it_was(config, models):  # noqa: F811
    config = masked(config, data={"clients": 6}, training={"rounds": 1}, method="fedit")
    federation = Federation(config, models)
    federation.engine.enrol(6)
    method = build_method(config)
    state = method.prepare(federation.engine)
    federation.grid.fate = lambda asked, node, t: "dies" if asked == "train" and node > 102 else "answers"
    with pytest.raises(UserError, match="round 1 got 0 of the 1 usable answers"):
        one_round(method, federation.engine, state, federation.engine.members, 0)
    assert "3 of 6 clients are too few to open their sum; nothing is used" in federation.said


def diverging(method, clients, value):
    """The same method, whose clients with these numbers learn nothing but this."""
    real = method.local_updates

    def spoilt(*asked):
        for update in real(*asked):
            wild = torch.full_like(update.delta_theta, value)
            yield replace(update, delta_theta=wild) if update.client in clients else update

    method.local_updates = spoilt
    return method


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e12])
@pytest.mark.parametrize("travels", [False, True])
def test_a_client_that_diverges_costs_its_own_answer(travels, value, config, backbone):
    config, said = masked(config, data={"clients": 6}, training={"rounds": 1}), []
    engine, method = make_engine(config, backbone), build_method(config)
    engine.travels = engine.exit.travels = travels
    engine.console.warn = said.append
    state = method.prepare(engine)
    members = list(engine.members)
    expected, _ = one_round(method, engine, state, [c for c in members if c.index != 2], 0)
    moved, report = one_round(diverging(method, {2}, value), engine, state, members, 0)
    assert (moved.theta - expected.theta).abs().max() <= 1e-5 < (moved.theta - state.theta).abs().max()
    assert report.receipts.accepted == {0, 1, 3, 4, 5} and len(said) == 1
    assert said[0].startswith(f"{members[2].name} gave no answer: an answer holds NaN or numbers beyond")
    with pytest.raises(UserError, match="round 1 got 0 of the 1 usable answers"):
        one_round(diverging(method, {0, 1, 3}, value), engine, state, members, 0)
    assert said[-1].endswith("2 of 6 clients are too few to open their sum; nothing is used.")
    engine.detach()


def test_a_site_that_diverges_says_so_and_costs_its_own_answer(config, models):  # noqa: F811
    config = masked(config, data={"clients": 6}, training={"rounds": 1})
    federation = Federation(config, models)
    federation.sites[2].build_method = lambda config: diverging(build_method(config), {2}, math.nan)
    _, _, (report,) = federation.run()
    assert len(report.receipts.accepted) == 5 and "gave no answer: an answer holds NaN" in federation.said


def test_a_site_does_not_answer_without_masks(config, models):  # noqa: F811
    config = masked(config, method="fedit", data={"clients": 3})
    federation = Federation(config, models)
    federation.engine.enrol(3)
    method, engine = build_method(config), federation.engine
    state = method.prepare(engine)
    assert not list(engine.hear(method.train, method.train, engine.members, broadcast(state, 0), Receipts()))
    assert "gave no answer: Broken" in federation.said


def test_noise_under_masks_is_spread_over_those_who_must_answer(config, backbone, monkeypatch):
    """Each of n clients adds 1/√t of it, so that t of them have all; also for experts that it does not serve."""
    noise, clip, clients = 1e3, 0.5, 6
    monkeypatch.setattr(Budget, "noise", lambda self, step, examples=0: noise)
    pytest.importorskip("dp_accounting", reason="pip install 'fedweave[privacy]'")
    private = {"privacy": {"level": "client", "clip": clip}, "discovery": {"max_buckets": 1, "sketch": 4}}
    config = masked(config, data={"clients": clients}, **private)
    engine, method = make_engine(config, backbone), build_method(config)
    state = method.prepare(engine)
    served = [sum(m in client.assignment for client in engine.members) for m in range(state.layout.experts)]
    moved, _ = one_round(method, engine, state, engine.members, 0)
    whole = noise * clip * (clients / threshold(clients)) ** 0.5
    for m, count in enumerate(served):
        own = state.layout.expert_of_column == m
        assert (moved.theta - state.theta)[own].std().item() == pytest.approx(whole / count, rel=0.1)
    assert (moved.phi - state.phi).std().item() == pytest.approx(whole / clients, rel=0.1)


def test_client_level_privacy_and_masks_go_together_over_flower(config, backbone, models):  # noqa: F811
    pytest.importorskip("dp_accounting", reason="pip install 'fedweave[privacy]'")
    config = masked(config, privacy={"level": "client"}, discovery={"max_buckets": 1, "sketch": 4})
    engine = make_engine(config, backbone)
    _, expected = run(config, engine)
    federation = Federation(config, models)
    federation.engine.enrol(5)
    method = build_method(config)
    state = method.prepare(federation.engine)
    final = federate(method, federation.engine, state, range(2), lambda state, report: None)
    assert (final.theta - expected.theta).abs().max() <= 1e-4 * expected.theta.abs().max()
    here, there = (privacy_figures(config, e.members, e.answered) for e in (engine, federation.engine))
    assert here == there


@pytest.mark.parametrize(
    "sections, sentence",
    [
        ({"federation": {"rule": "krum"}}, r"federation\.rule=krum compares.*set it to mean"),
        ({"federation": {"max_share": 0.3}}, r"set federation\.max_share=1"),
        ({"federation": {"quarantine": 2}}, r"set federation\.quarantine=0"),
        ({"federation": {"update_dtype": "int8"}}, r"set federation\.update_dtype=float32"),
        ({"method": "fedlease"}, "fedlease does not"),
        ({"experts": {"labels": "router"}}, r"set experts\.labels=buckets"),
        ({"data": {"clients": 2}}, "three clients in every round"),
        ({"training": {"participation": 2}}, "three clients in every round"),
    ],
)
def test_what_needs_single_answers_is_refused_by_a_sentence(sections, sentence, config):
    with pytest.raises(UserError, match=sentence):
        masked(config, **sections)


def test_a_whole_run_on_sums_is_told_as_one(tiny_run, tmp_path):
    folder = tiny_run("federation.secure_aggregation=true")
    assert all(event["client_losses"].keys() == {"all clients"} for event in events(folder, "round"))
    assert main(["export", str(folder), str(tmp_path / "bundle")]) == 0
    assert "totals alone (secure aggregation)" in (tmp_path / "bundle" / "README.md").read_text()
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0


def test_a_rehearsal_shows_what_would_be_masked(config, tmp_path, model_folder):
    rows = [json.dumps({"prompt": f"Say {n}.", "response": str(n)}) for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    settings = SiteConfig("clinic", str(tmp_path / "rows.jsonl"), floors=Floors(secure=True))
    settings = replace(settings, backbone=replace(settings.backbone, model=str(model_folder("llama"))))
    said = check_site(settings, masked(config), build_method, Console(quiet=True))
    assert "masks   on all that is added up" in said and "secure True" in said and "expert.0" in said
    with pytest.raises(UserError, match=r"floors\.secure asks for"):
        check_site(settings, masked(config, on=False), build_method, Console(quiet=True))


# -------------------------------------------------------------------------------------- one that lies


@pytest.mark.parametrize(
    ("step", "part", "value"),
    [("start", "expert.0", 1e6), ("warm", "router", 1e6), ("train", "router", 1e6),
     ("train", "figure.counts", -1e4), ("train", "figure.samples", -1e4), ("evaluate", "figure.total", -1e6)],
)  # fmt: skip
def test_a_sum_that_no_clients_can_have_is_not_used(step, part, value, config, backbone):
    """Nobody sees whose it was, but what one client adds does not become the model."""
    config = masked(config, training={"rounds": 1})
    engine, method, said = make_engine(config, backbone), build_method(config), []
    engine.console.warn, real = said.append, engine.answers
    for client in engine.members:
        client.held = client.data

    def lying(asked_step, asked, question):
        for one, (client, message) in zip(asked, real(asked_step, asked, question), strict=True):
            if client.index == 1 and asked_step.name == step:
                first = 0
                for name, shape in asked_step.totals(one).items():
                    if name == part:
                        message.tensors[MASKED][first : first + math.prod(shape)] += int(value * 2**FRACTION)
                    first += math.prod(shape)
            yield client, message

    engine.answers = lying
    state = method.prepare(engine)
    if step == "train":
        with pytest.raises(UserError, match="round 1 got 0 of the 1 usable answers"):
            one_round(method, engine, state, engine.members, 0)
    elif step == "evaluate":
        assert evaluated(engine, method, state).count == 0
    engine.detach()
    assert len(said) >= 1 and all("the sum of all answers is not used" in line for line in said)
    assert state.theta.abs().max() < 10 and state.phi.abs().max() < 10
