"""Trackers get what metrics.jsonl gets. Each one that is installed is run for real and read back."""

import importlib
import json

import pytest

from fedweave.cli import main
from fedweave.config import load_config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.runs.loggers import LOGGERS, Loggers, open_loggers, require_loggers, scalars

VALIDATION = {
    "event": "validation", "round": 2, "loss": 1.5, "tasks": {"sum": 1.0, "macro": 1.5}, "router_entropy": 0.25,
    "expert_load": [0.75, 0.25],
}  # fmt: skip
ROUND = {
    "event": "round", "round": 2, "train_loss": 0.5, "tokens": 100, "bytes_up": {"a:b": 2_000_000},
    "bytes_down": 3_000_000, "participants": ["a:b"],
    "client_losses": {"a:b": 0.5}, "agreement": {"a:b": None},
}  # fmt: skip


def test_events_become_named_figures():
    assert scalars(VALIDATION) == {
        "validation/loss": 1.5, "router/entropy": 0.25, "validation/loss/sum": 1.0, "validation/loss/macro": 1.5,
        "experts/load/0": 0.75, "experts/load/1": 0.25,
    }  # fmt: skip
    assert scalars(ROUND) == {
        "train/loss": 0.5, "train/tokens": 100, "communication/up_mb": 2.0, "communication/down_mb": 3.0,
        "client/a_b/loss": 0.5,
    }  # fmt: skip


def test_a_failing_tracker_is_dropped_and_the_others_go_on(capsys):
    class Broken:
        def log(self, values, step):
            raise ConnectionError("no route to host")

        def close(self):
            raise AssertionError("a dropped tracker is left alone")

    class Good(list):
        def log(self, values, step):
            self.append((step, values["validation/loss"]))

        def close(self):
            self.append("closed")

    good = Good()
    loggers = Loggers([("wandb", Broken()), ("mlflow", good)], Console())
    loggers.event(VALIDATION)
    loggers.event(VALIDATION)
    loggers.close()
    assert good == [(2, 1.5), (2, 1.5), "closed"]
    assert capsys.readouterr().err.count("wandb stopped taking figures (no route to host)") == 1


def test_a_missing_package_is_named_before_anything_starts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'fedweave\[mlflow\]'"):
        require_loggers(["mlflow"])
    assert main(["run", "quickstart", "loggers=[wandb]", "backbone.model=./none", f"output={tmp_path / 'r'}"]) == 2
    assert "fedweave[wandb]" in capsys.readouterr().err and not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("text", "message"), [("loggers=[tensorbord]", "did you mean 'tensorboard'"), ("loggers=3", "a list of names")]
)
def test_a_misspelt_tracker_is_one_sentence(text, message):
    with pytest.raises(UserError, match=message):
        load_config("quickstart", [text])


def test_tensorboard_holds_every_round_once_even_after_resuming(tmp_path, small):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    assert main(["run", "quickstart", *small, "loggers=tensorboard", "training.rounds=2", f"output={folder}",
                 "--quiet"]) == 0  # fmt: skip
    assert main(["resume", str(folder), "training.rounds=3", "--quiet"]) == 0
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    logged = {e.step: e.value for e in events.Scalars("validation/loss")}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wanted = {e["round"]: e["loss"] for e in lines if e["event"] == "validation"}
    assert logged == pytest.approx(wanted) and len(events.Scalars("validation/loss")) == 4
    summary = json.loads((folder / "summary.json").read_text())
    assert events.Scalars("test/score/macro")[-1].value == pytest.approx(summary["test"]["best"]["score"]["macro"])


def drive(name, folder):
    """Two sessions of one run in one tracker."""
    folder.mkdir()
    config = load_config("quickstart", [f"loggers={name}"])
    for step in (1, 2):
        loggers = open_loggers(config, folder, step, Console())
        assert [n for n, _ in loggers.opened] == [name]
        loggers.event("validation", {**VALIDATION, "round": step})
        assert loggers.opened, "the tracker must take the figures"
        loggers.close()


def test_wandb_offline(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'fedweave[wandb]'")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    drive("wandb", tmp_path / "run")
    assert "cannot be used" not in capsys.readouterr().err
    records = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(records) == 2 and len({r.name for r in records}) == 1, "both sessions are the same run"
    assert all(b"validation/loss/sum" in r.read_bytes() for r in records)


def test_mlflow_database(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'fedweave[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "run"
    drive("mlflow", folder)
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    run = json.loads((folder / "loggers.json").read_text())["mlflow"]
    history = client.get_metric_history(run, "validation/loss/sum")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 1.0)]
    assert client.get_run(run).data.params["training.rounds"] == "4"


def test_trackio_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read when trackio is first imported
    pytest.importorskip("trackio", reason="trackio is not installed: pip install 'fedweave[trackio]'")
    from trackio.sqlite_storage import SQLiteStorage

    drive("trackio", tmp_path / "run")
    name = json.loads((tmp_path / "run" / "loggers.json").read_text())["trackio"]
    rows = SQLiteStorage.get_logs("fedweave", name)
    assert [(row["step"], row["validation/loss"]) for row in rows] == [(1, 1.5), (2, 1.5)]


def test_every_tracker_has_an_extra():
    from pathlib import Path

    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert all(f"\n{name} = [" in pyproject for name in LOGGERS)
