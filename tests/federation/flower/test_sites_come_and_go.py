"""Sites that die, are late, answer twice, come back, join late or leave: the others' model is always right.

Here nodes are functions, so that each case takes a second; test_deployment.py kills real processes.
"""

import pytest
import torch

from fedweave.config import from_tree
from fedweave.console import Console
from fedweave.data import load_data
from fedweave.errors import UserError
from fedweave.federation.hello import Anatomy
from fedweave.federation.site.site import Site
from fedweave.federation.site.source import Share
from fedweave.methods import build_method
from fedweave.settings import to_tree
from tests.federation.flower.conftest import Federation
from tests.federation.flower.test_one_truth import changed
from tests.federations import changed as with_sections

NODE = 101  # client_1's


def with_federation(config, **settings):
    tree = to_tree(config)
    tree["federation"] |= settings
    return from_tree(tree)


def without(config, models, fate, **settings):
    """A federation in which something happens to client_1's answers."""
    federation = Federation(with_federation(changed(config), deadline=1.0, **settings), models)
    federation.grid.fate = lambda step, node, t: fate(step, t) if node == NODE else "answers"
    return federation


@pytest.mark.parametrize(("fate", "line"), [("dies", "gave no answer"), ("late", "did not answer within 1 s")])
def test_a_round_goes_on_without_a_site_and_takes_it_back(fate, line, config, models):
    """Weights renormalise over those that answered, for every expert; the site is in the next round again."""
    federation = without(config, models, lambda step, t: fate if (step, t) == ("train", 0) else "answers")
    state, _, reports = federation.run()
    assert [len(report.receipts.accepted) for report in reports] == [2, 3]
    assert f"client_1 {line}" in federation.said
    method_state = state
    assert all(report.participants[1].name == "client_1" for report in reports) and method_state.theta.any()


def test_whoever_watches_sees_how_many_sites_are_waited_for(config, models):
    federation, seen = Federation(with_federation(changed(config), patience=0.1), models), []
    federation.engine.console.on_progress = lambda *told: seen.append(told)
    with pytest.raises(UserError, match="has waited"):
        federation.engine.enrol(5)
    assert seen[-1] == ("sites here", 3, 5)


QUESTIONS = ["discover", "warm", "relabel", "moments", "distances"]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_site_that_dies_before_the_first_round_takes_nobody_with_it(question, config, models):
    """With the questions of the weave recipe; whoever was not aligned joins later."""
    woven = with_sections(
        config,
        experts={"labels": "router", "shared_rank": 8},
        router={"familiar": 0.9},
        alignment={"min_share": 0.05},
    )
    federation = without(woven, models, lambda step, t: "dies" if step == question else "answers")
    state, _, reports = federation.run()
    assert all({0, 2} <= report.receipts.accepted for report in reports)
    report = state.report
    assert len(report["signature_distance"]) == report["prototypes"] == len(report["prototype_labels"])


def test_weights_renormalise_over_those_that_answered(config, models):
    """One round without client_1 is the average of the other two alone, expert by expert."""
    one = changed(config, rounds=1)
    federation = without(one, models, lambda step, t: "late" if step == "train" else "answers")
    federation.config = with_federation(changed(one, rounds=1), deadline=1.0)
    federation.engine.config = federation.config
    state, final, _ = federation.run()
    layout = state.layout
    theta, weight = torch.zeros(layout.size), torch.zeros(layout.experts)
    for way, _, answer in federation.grid.sent:
        if way == "up" and "losses" in answer.facts:
            for m, count in enumerate(answer.facts["counts"]):
                if count:
                    columns = layout.expert_of_column == m
                    theta[columns] += count * answer.tensors[f"expert.{m}"]
                    weight[m] += count
    expected = state.theta + theta / weight.clamp(min=1)[layout.expert_of_column]
    torch.testing.assert_close(final.theta, expected, atol=1e-6, rtol=0)


def test_an_answer_that_comes_twice_counts_once(config, models):
    plain = Federation(changed(config), models).run()[1]
    federation = without(config, models, lambda step, t: "twice" if step == "train" else "answers")
    _, final, reports = federation.run()
    assert torch.equal(plain.theta, final.theta) and all(len(r.receipts.accepted) == 3 for r in reports)


def test_too_few_answers_repeat_the_round_and_lose_nothing(config, models):
    plain = Federation(changed(config), models).run()[1]
    fates = iter(["dies", "answers", "answers"])
    federation = without(
        config, models, lambda step, t: next(fates) if step == "train" else "answers", min_answers=3, repeats=1
    )
    _, final, _ = federation.run()
    assert torch.allclose(plain.theta, final.theta, atol=1e-6) and "it is repeated" in federation.said


def test_private_parameters_move_once_when_a_round_is_repeated(config, models):
    config = changed(config, "fedsa-lora")
    plain = Federation(config, models)
    plain.run()
    fates = iter(["dies", "answers", "answers"])
    federation = Federation(with_federation(config, deadline=1.0, min_answers=3, repeats=1), models)
    federation.grid.fate = lambda step, node, t: next(fates) if node == NODE and step == "train" else "answers"
    federation.run()
    for a, b in zip(plain.sites, federation.sites, strict=True):
        own, again = (site.session.client.memory.after["own"] for site in (a, b))
        torch.testing.assert_close(own, again, atol=1e-6, rtol=0)


def test_a_site_that_leaves_for_good_is_not_waited_for(config, models):
    federation = Federation(changed(config, rounds=3), models)

    def fate(step, node, t):
        if (step, t) == ("train", 1):
            federation.grid.nodes.pop(NODE, None)
        return "dies" if node == NODE and step == "train" and t else "answers"

    federation.grid.fate = fate
    _, final, reports = federation.run()
    assert [len(report.participants) for report in reports] == [3, 3, 2]
    assert "site client_1 is away" in federation.said and torch.isfinite(final.theta).all()


def test_a_site_that_dies_in_the_warm_start_is_missed_once_until_it_is_back(config, models):
    """Four averages ask four times; in the third it is there."""
    config = with_sections(config, router={"warm_start": {"rounds": 4}})
    federation = without(config, models, lambda step, t: "dies" if step == "warm" and t != 2 else "answers")
    _, _, reports = federation.run()
    assert federation.said.count("client_1 gave no answer: its node went away.") == 2
    assert all(len(report.receipts.accepted) == 3 for report in reports)


def test_a_site_that_comes_back_with_another_node_is_the_same_site(config, models):
    federation = Federation(changed(config, rounds=3), models)

    def fate(step, node, t):
        if (step, t, node) == ("train", 0, 100):
            federation.grid.nodes[555] = federation.grid.nodes.pop(NODE)
        return "dies" if node == NODE and t == 0 and step == "train" else "answers"

    federation.grid.fate = fate
    _, _, reports = federation.run()
    assert [len(report.receipts.accepted) for report in reports] == [2, 3, 3] and len(
        federation.engine.members
    ) == 3
    assert "site client_1 is here" in federation.said


@pytest.mark.parametrize(("limit", "near"), [(2.0, True), (1e-6, False)])
def test_a_late_site_joins_the_nearest_experts_or_is_kept_apart(limit, near, config, models):
    config = with_federation(changed(config, rounds=3), join_distance=limit)
    federation = Federation(config, models)
    late = federation.grid.nodes.pop(102)

    def fate(step, node, t):
        if (step, t) == ("train", 0):
            federation.grid.nodes[102] = late
        return "answers"

    federation.grid.fate = fate
    state, _, reports = federation.run(sites=2)
    joined = federation.engine.members[-1]
    assert joined.name == "client_2" and joined.index == 2
    assert "site client_2 joins" in federation.said
    if near:
        assert all(0 <= m < state.layout.experts for m in joined.assignment)
        assert len(reports[-1].receipts.accepted) == 3
    else:
        assert set(joined.assignment) == {-1} and "kept apart" in federation.said
        assert all(len(report.receipts.accepted) == 2 for report in reports)


def test_the_same_name_twice_and_another_model_are_turned_away(config, models, model_folder):
    federation = Federation(changed(config), models)
    federation.grid.nodes[300] = federation.answering(
        Site(Share(federation.config, 1), models, build_method, Console(quiet=True))
    )
    tree = to_tree(federation.config)
    tree["backbone"]["model"] = str(model_folder("qwen2"))
    other = Share(from_tree(tree), 2)
    other.name, other.backbone = "stranger", lambda config: from_tree(tree).backbone
    from fedweave.federation.site.site import Models

    federation.grid.nodes[301] = federation.answering(Site(other, Models(), build_method, Console(quiet=True)))
    _, _, reports = federation.run(sites=3)
    assert "site client_1 is turned away: another node has this name" in federation.said
    assert "site stranger is turned away: its backbone is not" in federation.said
    assert all(len(report.receipts.accepted) == 3 for report in reports)


@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_server_knows_a_site_from_one_of_its_name(config, models, first):
    """Whoever says hello first: the key that had the name before has it for good."""
    federation = Federation(changed(config), models)
    federation.run()
    records = [client.record() for client in federation.engine.members]
    again = Federation(federation.config, models, federation.sites)
    impostor = again.answering(Site(Share(federation.config, 1), models, build_method, Console(quiet=True)))
    own = again.grid.nodes.pop(NODE)
    again.grid.nodes |= {300: impostor} if first else {NODE: own}
    again.engine.meet()
    again.grid.nodes |= {NODE: own, 300: impostor}
    again.engine.restore(records, {})
    seats = {client.name: client.node for client in again.engine.present()}
    assert seats["client_1"] == NODE and len(seats) == 3
    assert "site client_1 is turned away: " in again.said
    del again.grid.nodes[NODE]
    again.engine.present()
    assert "client_1" not in {client.name for client in again.engine.present()}
    assert "site client_1 is turned away: its name belongs to another key" in again.said
    again.grid.nodes[777] = own
    again.engine.present()
    assert {client.name: client.node for client in again.engine.present()}["client_1"] == 777


def test_a_node_bears_the_name_that_it_was_registered_under(config, models):
    federation = Federation(changed(config), models)
    federation.grid.registered = {100: "client_0", 101: "client_1", 102: "clinic"}
    _, _, reports = federation.run(sites=2)
    assert "site client_2 is turned away: its node is registered as clinic" in federation.said
    assert all(len(report.participants) == 2 for report in reports)


class Liar:
    """A site that says another thing of its model than is true; it is greeted before the others."""

    def __init__(self, federation, **facts):
        honest, self.facts, self.key = federation.grid.nodes[100], facts, b"liar"
        self.answer = honest
        federation.grid.nodes = {1: self, **federation.grid.nodes}

    def __call__(self, question):
        reply = self.answer(question)
        reply.facts |= {"name": "liar", **self.facts} if question.facts["step"] == "hello" else {}
        return reply


@pytest.mark.parametrize(
    "facts", [{"backbone": "0" * 64}, {"fingerprint": "0" * 32}, {"width": 7}, {"outputs": [9, 9, 9, 9]}]
)
def test_one_site_cannot_say_what_the_model_is(facts, config, models):
    federation = Federation(changed(config), models)
    Liar(federation, **facts)
    _, _, reports = federation.run(sites=3)
    assert "site liar is turned away" in federation.said
    assert all(len(report.receipts.accepted) == 3 for report in reports)


def test_whose_model_keeps_a_federation_waiting_is_said(config, models):
    """As many as are needed are here, and one of them has another model: nobody would see what is missing."""
    federation = Federation(with_federation(changed(config), patience=1.0), models)
    Liar(federation, width=7)
    with pytest.raises(UserError, match=r"\(here: client_0, .*; with another model than most: liar\)"):
        federation.engine.enrol(4)
    assert "waiting for 4 sites; here: client_0, client_1, client_2, liar; with another" in federation.said


def test_the_operator_says_what_the_model_is(config, models):
    plain = Federation(changed(config), models)
    plain.engine.enrol(3)
    config = with_federation(changed(config), fingerprint=plain.engine.model.fingerprint)
    federation = Federation(config, models)
    Liar(federation, fingerprint="0" * 32)
    federation.engine.enrol(1)
    assert "site liar is turned away: its backbone is not the one of federation.fingerprint" in federation.said
    assert federation.engine.model == plain.engine.model
    assert Anatomy.recorded(plain.engine.model.record) == plain.engine.model


def test_a_resumed_server_finds_its_sites_again_and_takes_none_twice(config, models):
    federation = Federation(changed(config), models)
    federation.run()
    records = [client.record() for client in federation.engine.members]
    again = Federation(federation.config, models, federation.sites)
    again.engine.meet()  # a site may say hello before the checkpoint is read
    again.engine.restore(records, {})
    present = again.engine.present()
    assert [client.name for client in present] == ["client_0", "client_1", "client_2"]
    assert [client.record() for client in again.engine.members] == records and "joins" not in again.said


def test_too_few_sites_end_in_a_sentence(config, models):
    federation = Federation(with_federation(changed(config), patience=1.0), models)
    with pytest.raises(UserError, match="has waited"):
        federation.run(sites=9)


def test_changed_data_is_noticed(config, models):
    """A site whose rows changed since alignment says so instead of training on other buckets."""
    federation = Federation(changed(config), models)

    def fate(step, node, t):
        if step == "train" and node == NODE and t == 1:
            site = federation.sites[1]
            site.session = None
            rows = load_data(federation.config).clients["client_1"]
            site.source.data.clients["client_1"] = rows[: len(rows) // 2]
        return "answers"

    federation.grid.fate = fate
    _, _, reports = federation.run()
    assert [len(report.receipts.accepted) for report in reports] == [3, 2]
    assert "its data has changed since this federation was aligned" in federation.said
