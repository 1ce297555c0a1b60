"""What a run records for its readers, and that labels change nothing but labels."""

import json
import socket

import pytest
import torch

from fedweave.data.examples import Example
from fedweave.runs.live import LiveProgress, read_live
from fedweave.runs.records import validation_record
from fedweave.runs.workspace import TestSet as HeldOut
from tests.helpers import read_json, read_jsonl


def test_a_run_records_what_the_report_shows(tiny_run):
    finished = tiny_run("training.local_steps=8", "evaluation.score_rounds=true")
    discovery, embedding = (read_json(finished / f"{name}.json") for name in ("discovery", "embedding"))
    for name, client in discovery["clients"].items():
        assert [sum(tasks.values()) for tasks in discovery["bucket_tasks"][name]] == client["buckets"]
    assert len(embedding["points"]) == len(embedding["tasks"]) == 48 and len(embedding["points"][0]) == 16
    assert set(embedding["experts"]) == set(range(discovery["experts"]))
    shares = embedding["explained"]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1.001
    for event in read_jsonl(finished / "metrics.jsonl"):
        if event["event"] == "validation":
            assert sum(event["expert_load"]) == pytest.approx(1, abs=1e-5)
            assert set(event["scores"]) == set(event["tasks"])
        else:
            assert set(event["client_losses"]) == set(event["agreement"]) == set(event["participants"])
            assert sum(event["client_losses"].values()) / 3 == pytest.approx(event["train_loss"])
            assert all(c is None or -1 <= c <= 1 for c in event["agreement"].values())


def test_entropy_and_load_of_a_router_worked_out_by_hand():
    held = HeldOut([Example("", "", task, "") for task in "aabb"], [], torch.zeros(4, 1))
    weights = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [0.0, 1.0]])
    record = validation_record(torch.tensor([1.0, 2.0, 3.0, 5.0]), weights, held, 3)
    assert record["router_entropy"] == pytest.approx(0.6931 / 4, abs=1e-3)
    assert record["expert_load"] == [0.5, 0.5] and record["expert_weight"] == [0.375, 0.625]
    assert record["loss"] == 2.75 and record["tasks"] == {"a": 1.5, "b": 4.0, "macro": 2.75}


def test_progress_tells_running_finished_and_stopped_apart(tmp_path):
    assert read_live(tmp_path) is None
    live = LiveProgress(tmp_path, 5)
    live.begin_rounds(0)
    live.round_done()
    assert read_live(tmp_path)["state"] == "running" and len(read_live(tmp_path)["round_seconds"]) == 1
    again = LiveProgress(tmp_path, 5)
    again.phase("loading", 0, 1)  # a look before the first round finds that the run goes on
    again.begin()
    again.begin_rounds(1)  # resumed: the first round's time is kept
    again.round_done()
    assert len(read_live(tmp_path)["round_seconds"]) == 2
    content = read_json(tmp_path / "progress.json")
    assert content["host"] == socket.gethostname()
    (tmp_path / "progress.json").write_text(json.dumps({**content, "pid": 2**22 + 1}))  # above Linux's largest
    assert read_live(tmp_path)["state"] == "stopped"
    again.finish()
    assert read_live(tmp_path)["state"] == "finished"
