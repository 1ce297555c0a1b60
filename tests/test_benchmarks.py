"""Benchmarks are programs that people run: those that a CPU can run do, at their smallest."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import update_bytes
from fedweave.files import read_text
from tests.helpers import read_json

RECORDED = Path(__file__).parents[1] / "benchmarks/results"


@pytest.fixture
def measure(monkeypatch, capsys):
    """What a benchmark prints with these arguments."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        import_module(f"benchmarks.{name}").main()
        return capsys.readouterr().out

    return call


def test_the_bytes_in_the_docs_are_those_of_the_code(measure):
    printed = measure("update_bytes")
    assert printed.strip() in read_text(RECORDED.parents[1] / "docs/scale.md")
    recorded = read_json(RECORDED / "update_bytes.json")
    assert recorded == {name: update_bytes.figures(*shape, 2, 4) for name, shape in update_bytes.SHAPES.items()}


def test_sketches_align_as_whole_signatures_do(measure, tmp_path):
    measure("signature_sketches", "--output", tmp_path / "found.json", "scale", "--prototypes", 60)
    assert read_json(tmp_path / "found.json")["agreement"] == 1.0


def test_masks_cost_what_is_printed(measure, tmp_path):
    measure(
        "secure_aggregation", "--sites", 4, "--numbers", 2000, "--away", "0,1", "--output", tmp_path / "found.json"
    )
    whole, lost = read_json(tmp_path / "found.json")
    assert whole["sites"] == lost["sites"] == 4
    assert [one["away"] for one in (whole, lost)] == [0, 1]


def test_a_warm_started_router_is_measured_on_every_kind(measure, small):
    printed = measure("warm_start", "quickstart", *small, "data.alpha=0.5")
    assert all(kind in printed for kind in ("Edit", "Sum", "Mood", "Choice"))
    assert printed.count(" × ") == 2 * 3 + 1  # own and all, three lengths; and the heading


def test_decoding_is_measured_with_one_expert_and_all(measure, tiny_run, tmp_path):
    found = tmp_path / "found.json"
    measure("decoding", tiny_run(), "--rows", 2, "--steps", 2, "--output", found)
    assert read_json(found)


def test_repeats(measure, small):
    assert measure("repeats", "quickstart", *small, "--times", 2, "--tokens", 2)


@pytest.mark.slow
def test_memory_of_a_server_is_measured(measure, tmp_path):
    measure("server_memory", "--clients", 2, 4, "--output", tmp_path / "found.json")
    assert {"server", "simulation"} == set(read_json(tmp_path / "found.json"))


@pytest.mark.slow
def test_leaks_and_purity_under_noise(measure, small, tmp_path):
    found = tmp_path / "found.json"
    for words in ([], ["--words"]):
        measure("leaks", "--seeds", 1, "--clients", 3, "--examples", 12, *words, "--output", found)
    assert {"members", "words"} == set(read_json(found))
    measure("private_signatures", "--examples", 12, "--clients", 4, "--seeds", 1, "--output", found)
    assert read_json(found)
