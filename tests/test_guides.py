"""The guides to new methods and clusterers: a page's Python blocks, put together as one module, do what it says.

A block that cannot run says why in the line before it, as in test_docs.py.
"""

import importlib
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from fedweave.backbone.load import Backbone
from fedweave.cli import main
from fedweave.config import DiscoveryConfig, load_config
from fedweave.data import load_data
from fedweave.discovery.clusterers import CLUSTERERS
from fedweave.federation.checkpoint import load_checkpoint
from fedweave.registry import METHODS
from tests.discovery import test_clusterers
from tests.helpers import ROOT, blocks, read_json


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """Call with a page's name and a registry to get what the page's blocks, run in their order, add to it. Both are
    forgotten after the test."""
    made, before = [], [(registry, dict(registry)) for registry in (METHODS, CLUSTERERS)]

    def read(page: str, registry: dict) -> set[str]:
        made.append(page.replace("-", "_"))
        code = [block["body"] for block in blocks(ROOT / "docs" / f"{page}.md", "python") if not block["reason"]]
        (tmp_path / f"{made[-1]}.py").write_text("\n\n".join(code), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        known = set(registry)
        importlib.import_module(made[-1])
        return set(registry) - known

    yield read
    for registry, names in before:
        registry.clear()
        registry.update(names)
    for module in made:
        del sys.modules[module]


# -------------------------------------------------------------------------------------- methods


def theta(run: Path, completed: int) -> torch.Tensor:
    return load_checkpoint(run / "checkpoints" / f"round-{completed:04d}")[0]["theta"]


def learns_nothing(run: Path, plain: Path, backbone: Backbone) -> None:
    """With B at zero, A has no gradient."""
    assert torch.equal(theta(run, 0), theta(run, 2)) and not torch.equal(theta(plain, 0), theta(plain, 2))


def counts_tokens(run: Path, plain: Path, backbone: Backbone) -> None:
    """The server has heard every client's number, and it changes the average."""
    clients = load_data(load_config(str(run / "config.yaml"))).clients
    tokens = {name: sum(len(e.ids) for e in backbone.prompts.encode(rows)) for name, rows in clients.items()}
    assert read_json(run / "discovery.json")["tokens"] == tokens
    assert torch.equal(theta(run, 0), theta(plain, 0)) and not torch.equal(theta(run, 2), theta(plain, 2))


# What the page says of its methods, beside FedIT with the same seed.
PROPERTIES = {"only-a": learns_nothing, "by-tokens": counts_tokens}


def test_every_method_of_the_guide_is_tried_here(guide):
    assert guide("add-a-method", METHODS) == set(PROPERTIES)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_method_of_the_guide_runs_resumes_and_does_what_the_page_says(
    name, guide, small, tiny_run, tmp_path, backbone, says
):
    guide("add-a-method", METHODS)
    run, rank = tmp_path / "run", "experts.single_rank=4"
    settings = [*small, rank, f"method={name}", "training.rounds=1", f"output={run}"]
    assert main(["run", "quickstart", *settings, "--quiet"]) == 0
    assert main(["resume", str(run), "training.rounds=2", "--quiet"]) == 0
    PROPERTIES[name](run, tiny_run("method=fedit", rank, "training.rounds=2"), backbone)
    assert name in says("budget", run) and name in says("list", "methods")


# -------------------------------------------------------------------------------------- clusterers


def test_a_clusterer_of_the_guide_finds_groups_and_serves_a_run(guide, small, tmp_path, monkeypatch):
    """With its name in the config, as the page asks for, it passes the other clusterers' tests."""
    (name,) = guide("add-a-clusterer", CLUSTERERS)
    monkeypatch.setitem(DiscoveryConfig.__annotations__, "clusterer", Literal[tuple(CLUSTERERS)])
    for groups in (2, 4):
        test_clusterers.test_clear_groups_are_found_by_every_clusterer(name, groups)
    test_clusterers.test_three_examples_with_a_duplicate_still_cluster(name)
    run = tmp_path / "run"
    settings = [*small, f"discovery.clusterer={name}", "training.rounds=1", f"output={run}"]
    assert main(["run", "quickstart", *settings, "--quiet"]) == 0
    clients = read_json(run / "discovery.json")["clients"].values()
    assert any(len(client["buckets"]) > 1 for client in clients)
