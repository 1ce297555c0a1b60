"""The code of the guides for contributors runs as it stands on the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from fedweave.config import from_tree
from fedweave.discovery import clusterers
from fedweave.methods import method_class
from fedweave.registry import METHODS
from fedweave.settings import to_tree
from tests.federation.flower.conftest import Federation, models  # noqa: F401
from tests.methods.conftest import config, make_engine, run  # noqa: F401

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def page(monkeypatch):
    """Call with a page's name: all its Python blocks, in order, in one module of that name."""

    def load(name: str) -> ModuleType:
        module = ModuleType(name.replace("-", "_"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        blocks = re.findall(
            r"^```python\n(.*?)^```", (DOCS / f"{name}.md").read_text(encoding="utf-8"), re.M | re.S
        )
        assert blocks
        for number, block in enumerate(blocks):
            exec(compile(block, f"{name}.md, block {number}", "exec"), module.__dict__)
        return module

    for registry in (METHODS, clusterers.CLUSTERERS):
        for key in list(registry):
            monkeypatch.setitem(registry, key, registry[key])  # whatever a page adds goes again
    before = set(METHODS), set(clusterers.CLUSTERERS)
    yield load
    for registry, known in zip((METHODS, clusterers.CLUSTERERS), before, strict=True):
        for key in set(registry) - known:
            del registry[key]


def with_method(config, name):  # noqa: F811
    return from_tree({**to_tree(config), "method": name})


def test_a_method_is_one_class_and_one_line(page, config, backbone):  # noqa: F811
    page("add-a-method")
    start, final = run(with_method(config, "only-a"), make_engine(config, backbone))
    # with B at zero, A has no gradient: nothing moves, which is why FFA freezes A and not B
    assert torch.equal(start.theta, final.theta)
    assert all(method_class(name).summary for name in METHODS)


def test_a_new_question_travels_with_every_engine(page, config, backbone, models):  # noqa: F811
    page("add-a-method")
    tree = to_tree(with_method(config, "by-tokens"))
    tree["federation"] |= {"patience": 5.0, "deadline": 5.0}
    chosen = from_tree(tree)
    engine = make_engine(chosen, backbone)
    start, final = run(chosen, engine)
    told = {c.name: sum(len(e.ids) for e in c.data.examples) for c in engine.members}
    assert start.report["tokens"] == told and (final.theta != start.theta).any()
    federation = Federation(chosen, models)
    far, _, _ = federation.run()
    assert far.report["tokens"] == told and "warning" not in federation.said


def test_a_clusterer_is_one_function_and_one_line(page):
    page("add-a-clusterer")
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(centre, 0.01, (20, 4)) for centre in np.eye(4)[:3]])
    points = clusterers.Points.of(rows, "cpu")
    found = clusterers.CLUSTERERS["gaussians"](points, [2, 3], 0, 2)
    assert sorted(found) == [2, 3] and all(len(labels) == 60 for labels in found.values())
    assert all(len(set(found[3][i : i + 20])) == 1 for i in (0, 20, 40)) and len(set(found[3])) == 3
