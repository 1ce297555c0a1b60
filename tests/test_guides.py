"""The code of the guides for contributors runs as it stands on the page: its Python blocks are one module.

A block that cannot run says why in the line before it, as in test_docs.py.
"""

import importlib
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from fedweave.cli import main
from fedweave.config import DiscoveryConfig
from fedweave.discovery.clusterers import CLUSTERERS
from fedweave.federation.site.site import Models
from fedweave.registry import METHODS
from fedweave.runs.folder import RunFolder
from tests.discovery import test_clusterers
from tests.federation.flower.conftest import Federation
from tests.federations import changed, make_engine, run, with_method
from tests.helpers import ROOT, blocks, read_json


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """Call with a page's name and a registry to get the names that the page adds to it, until the test ends."""
    modules, before = [], [(registry, dict(registry)) for registry in (METHODS, CLUSTERERS)]

    def follow(page: str, registry: dict) -> set[str]:
        modules.append(page.replace("-", "_"))
        code = [block["body"] for block in blocks(ROOT / "docs" / f"{page}.md", "python") if not block["reason"]]
        (tmp_path / f"{modules[-1]}.py").write_text("\n\n".join(code), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        known = set(registry)
        importlib.import_module(modules[-1])
        return set(registry) - known

    yield follow
    for registry, names in before:
        registry.clear()
        registry.update(names)
    for module in modules:
        sys.modules.pop(module, None)


# -------------------------------------------------------------------------------------- methods


def test_one_class_and_one_line_make_a_method(guide, config, backbone):
    assert guide("add-a-method", METHODS) == {"only-a", "by-tokens"}
    start, final = run(with_method(config, "only-a"), make_engine(config, backbone))
    # with B at zero, A has no gradient: nothing moves, which is why FFA freezes A and not B
    assert torch.equal(start.theta, final.theta)


def test_a_new_question_travels_with_every_engine(guide, config, backbone):
    guide("add-a-method", METHODS)
    chosen = changed(config, method="by-tokens", federation={"patience": 5.0, "deadline": 5.0})
    engine = make_engine(chosen, backbone)
    start, final = run(chosen, engine)
    told = {c.name: sum(len(e.ids) for e in c.data.examples) for c in engine.members}
    assert start.report["tokens"] == told and (final.theta != start.theta).any()
    federation = Federation(chosen, Models())
    far, _, _ = federation.run()
    assert far.report["tokens"] == told and "warning" not in federation.said


def theta(folder: Path, completed: int) -> torch.Tensor:
    return RunFolder(folder).newest(completed).tensors["theta"]


@pytest.mark.parametrize(("method", "learns"), [("only-a", False), ("by-tokens", True)])
def test_a_new_method_runs_resumes_and_is_listed(method, learns, guide, small, tmp_path, says):
    guide("add-a-method", METHODS)
    folder = tmp_path / "run"
    settings = [*small, f"method={method}", "experts.single_rank=4", "training.rounds=1", f"output={folder}"]
    assert main(["run", "quickstart", *settings, "--quiet"]) == 0
    assert main(["resume", str(folder), "training.rounds=2", "--quiet"]) == 0
    assert torch.equal(theta(folder, 0), theta(folder, 2)) != learns
    assert method in says("budget", folder) and method in says("list", "methods")


# -------------------------------------------------------------------------------------- clusterers


def test_one_function_and_one_line_make_a_clusterer(guide, small, tmp_path, monkeypatch):
    """With its name in the config, as the page asks for, it passes the other clusterers' tests and serves a run."""
    (name,) = guide("add-a-clusterer", CLUSTERERS)
    monkeypatch.setitem(DiscoveryConfig.__annotations__, "clusterer", Literal[tuple(CLUSTERERS)])
    for groups in (2, 4):
        test_clusterers.test_clear_groups_are_found_by_every_clusterer(name, groups)
    test_clusterers.test_three_examples_with_a_duplicate_still_cluster(name)
    folder = tmp_path / "run"
    settings = [*small, f"discovery.clusterer={name}", "training.rounds=1", f"output={folder}"]
    assert main(["run", "quickstart", *settings, "--quiet"]) == 0
    clients = read_json(folder / "discovery.json")["clients"].values()
    assert any(len(client["buckets"]) > 1 for client in clients)
