"""One exit: a filter that is added in one place sees everything that leaves a client, whatever the question."""

from dataclasses import replace

import pytest

from fedweave.federation import exit as exits
from fedweave.federation.state import broadcast
from fedweave.methods import build_method
from tests.federation.flower.conftest import Federation
from tests.federation.flower.test_one_truth import changed
from tests.federations import make_engine


def everything(method, engine):
    """One round of every question of a method."""
    state = method.prepare(engine)
    question = broadcast(state, 0)
    for step in (method.train, method.evaluate):
        assert len(list(engine.ask(step, engine.members, question))) == len(engine.members)
    return state


@pytest.mark.parametrize("where", ["in process", "behind Flower"])
def test_a_filter_sees_signatures_adapters_warm_start_rounds_and_evaluation_sums(
    config, backbone, models, monkeypatch, where
):
    seen: dict[str, set[str]] = {}

    def halve(step, asked, client, answer):
        """Halves every tensor that moves, and every evaluation sum."""
        seen.setdefault(step.name, set()).update([*answer.parts, *answer.figures])
        parts = {
            k: v if k.startswith("expert.") and step.name == "start" else v / 2 for k, v in answer.parts.items()
        }
        sums = {"total": answer.figures["total"] / 2} if step.name == "evaluate" else {}
        return replace(answer, parts=parts, figures=answer.figures | sums)

    def run(filtered):
        monkeypatch.setattr(exits, "filters", lambda config: [halve] if filtered else [])
        chosen, method = changed(config), build_method(changed(config))
        if where == "in process":
            engine = make_engine(chosen, backbone)
        else:
            federation = Federation(chosen, models)
            engine = federation.engine
            engine.enrol(3)
        for client in engine.members:
            client.held = client.data if where == "in process" else None
        return method, engine, everything(method, engine)

    plain_method, plain_engine, plain = run(False)
    (_, full), *_ = plain_engine.ask(plain_method.evaluate, plain_engine.members, broadcast(plain, 0))
    assert not seen
    method, engine, state = run(True)
    assert seen.keys() == {"discover", "start", "warm", "moments", "distances", "train", "evaluate"}
    assert "signatures" in seen["discover"] and "router" in seen["warm"] & seen["train"]
    assert any(name.startswith("expert.") for name in seen["train"] & seen["start"])
    assert {"total", "entropy", "count"} == seen["evaluate"]
    (_, half), *_ = engine.ask(method.evaluate, engine.members, broadcast(plain, 0))
    assert half.total == pytest.approx(full.total / 2, rel=1e-5), "what the server reads is what the filter left"
    assert not state.phi.equal(plain.phi), "the warm start's average is of filtered updates"
