"""The same config and seed give the same model, whether clients are in this process or behind Flower's messages."""

import pytest
import torch

from fedweave.config import from_tree
from fedweave.errors import UserError
from fedweave.federation.rounds import federate
from fedweave.methods import METHODS, build_method
from fedweave.runs.course import BACK, ON, follow
from fedweave.runs.folder import Progress
from fedweave.settings import to_tree
from tests.federation.flower.conftest import Federation
from tests.federations import make_engine, run, with_method
from tests.helpers import assert_trained_alike
from tests.methods.test_weave import weave

pytestmark = pytest.mark.usefixtures("smooth_optimiser")


def changed(config, method="fedweave", **training):
    tree = to_tree(with_method(config, method))
    tree["training"] |= {"rounds": 2, **training}
    tree["federation"] |= {"patience": 5.0, "deadline": 5.0}
    return from_tree(tree)


# told labels, all data in one place, parts that stay at home; and singular vectors, which the last bit may turn
ELSEWHERE = ("oracle", "centralised", "local-only", "fedsa-lora", "fedsvd")


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ELSEWHERE])
def test_flower_gives_the_experts_and_router_of_the_in_process_run(method, config, backbone, models):
    config = changed(config, method)
    _, expected = run(config, make_engine(config, backbone))
    federation = Federation(config, models)
    _, final, reports = federation.run()
    assert all(len(report.receipts.accepted) == 3 for report in reports) and "warning" not in federation.said
    assert (final.theta - expected.theta).abs().max() <= 1e-5
    if expected.phi is not None:
        assert (final.phi - expected.phi).abs().max() <= 1e-5


def test_flower_gives_the_model_of_the_weave_recipe_too(config, backbone, models):
    """A shared part, labels by the router, and a router that is not trained."""
    config = changed(weave(config))
    _, expected = run(config, make_engine(config, backbone))
    federation = Federation(config, models)
    _, final, reports = federation.run()
    assert all(len(report.receipts.accepted) == 3 for report in reports) and "warning" not in federation.said
    assert final.layout == expected.layout and final.layout.shared
    assert (final.theta - expected.theta).abs().max() <= 1e-5 and (final.phi - expected.phi).abs().max() <= 1e-5


def test_sites_go_back_with_the_server(config, backbone, models):
    """Half of the rates reaches them with the question, and what rounding took before is forgotten."""
    tree = to_tree(changed(config, rounds=3))
    tree["federation"]["update_dtype"] = "bfloat16"
    config = from_tree(tree)
    federation = Federation(config, models)
    federation.engine.enrol(3)
    ends = []
    for engine in (make_engine(config, backbone), federation.engine):
        method = build_method(config)
        start = method.prepare(engine)
        progress = Progress(start, 0, start, 0, 0.0, 0.0)

        def after_round(state, report, progress=progress, engine=engine):
            progress.state, progress.completed = state, report.t + 1
            follow(progress, BACK if report.t == 0 else ON, engine)
            return progress.state

        ends.append(federate(method, engine, start, range(3), after_round))
    assert ends[0].pace == ends[1].pace == 0.5
    assert_trained_alike(ends[0].theta, ends[1].theta, 1e-4)  # a last bit may decide how bfloat16 rounds
    told = [
        q.facts["pace"] for way, node, q in federation.grid.sent if way == "down" and q.facts["step"] == "train"
    ]
    assert told == [1.0] * 3 + [0.5] * 6


def test_what_stays_at_a_site_cannot_go_back_so_that_is_said_first(config):
    tree = to_tree(with_method(config, "fedsa-lora"))
    tree["training"]["patience"] = 2
    build_method(from_tree(tree))
    with pytest.raises(UserError, match=r"keeps parameters at its sites.*set training\.patience=0"):
        build_method(from_tree(tree | {"engine": "flower"}))


@pytest.mark.parametrize("method", ["fedsa-lora", "local-only"])
def test_what_clients_keep_is_the_same_and_stays_at_the_sites(method, config, backbone, models):
    config = changed(config, method, participation=2)  # somebody sits every round out
    _, expected = run(config, make_engine(config, backbone))
    federation = Federation(config, models)
    _, final, _ = federation.run()
    assert final.private is None
    is_b = final.layout.is_b
    for site, private in zip(federation.sites, expected.private, strict=True):
        kept = is_b if method == "fedsa-lora" else torch.ones_like(is_b)
        own = site.session.client.memory.after.get("own") if site.session else None
        assert own is None or (own - private)[kept].abs().max() <= 1e-5
    if method == "fedsa-lora":
        assert (final.theta - expected.theta)[~is_b].abs().max() <= 1e-5
    up = [answer for way, _, answer in federation.grid.sent if way == "up" and "losses" in answer.facts]
    sent = sum(tensor.numel() for answer in up for tensor in answer.tensors.values())
    assert sent == (4 * int((~is_b).sum()) if method == "fedsa-lora" else 0)
