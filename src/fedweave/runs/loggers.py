"""Trackers: TensorBoard, Weights & Biases, MLflow and trackio behind one small interface.

metrics.jsonl is always written and is what everything in FedWeave reads; a tracker gets a copy of its figures.
Only the server side talks to trackers, so clients need no account. All four write to this machine unless their
own environment variables say otherwise (WANDB_MODE=online, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID).
"""

import importlib.util
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fedweave.config import Config
from fedweave.console import Console
from fedweave.errors import UserError, first_line
from fedweave.events import Event
from fedweave.json_files import read_json, write_json
from fedweave.schema import Summary
from fedweave.settings import flatten, to_tree

PROJECT = "fedweave"
_MANY_CLIENTS = 50  # beyond that a curve per client helps nobody


class Logger(Protocol):
    """What a tracker must do."""

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard; `tensorboard --logdir RUN`."""

    def __init__(self, config: Config, folder: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        # what an interrupted session logged beyond its last checkpoint happens again
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step or None)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Offline files in RUN/wandb, for `wandb sync`; WANDB_MODE=online goes live."""

    def __init__(self, config: Config, folder: Path, first_step: int):
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=_remembered(folder, "wandb", lambda: uuid.uuid4().hex[:12]),
            dir=str(folder),
            config=to_tree(config),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True),
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """The server of MLFLOW_TRACKING_URI, else a small database in RUN/mlflow.db."""

    def __init__(self, config: Config, folder: Path, first_step: int):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        local = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", local))
        self.run = _remembered(folder, "mlflow", lambda: self._create(folder.name))
        known = self.client.get_run(self.run).data.params
        params = {k: str(v)[:500] for k, v in flatten(to_tree(config)).items()}
        self.client.log_batch(self.run, params=[Param(k, v) for k, v in params.items() if k not in known])

    def _create(self, name: str) -> str:
        found = self.client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self.client.create_experiment(PROJECT)
        return self.client.create_run(experiment, run_name=name).info.run_id

    def log(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(self.run, metrics=[Metric(k, v, now, step) for k, v in values.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Trackio(WandB):
    """trackio's own local store; `trackio show --project fedweave`."""

    def __init__(self, config: Config, folder: Path, first_step: int):
        import trackio

        name = _remembered(folder, "trackio", lambda: f"{folder.name}-{uuid.uuid4().hex[:6]}")
        self.run = trackio.init(
            project=PROJECT, name=name, config=to_tree(config), resume="allow", embed=False, auto_log_gpu=False,
            auto_log_cpu=False,
        )  # fmt: skip


# by the names of their packages
LOGGERS: dict[str, type] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}


class Loggers:
    """All trackers of a run. One that fails is dropped with a warning: no tracker is worth a training run."""

    def __init__(self, opened: Sequence[tuple[str, Logger]], console: Console | None = None):
        self.opened, self.console = list(opened), console or Console(quiet=True)

    def event(self, event: Event) -> None:
        """A line of metrics.jsonl."""
        self._each(lambda logger: logger.log(scalars(event), event["round"]))

    def test(self, summary: Summary) -> None:
        """The figures at the end, at the best round's step."""
        values: dict[str, float] = {}
        for name, tested in (("test", summary["test"].get("best")), ("unseen", summary["test"].get("unseen"))):
            if tested:
                values |= {f"{name}/loss/{task}": value for task, value in tested["loss"][tested["used"]].items()}
                values |= {f"{name}/score/{task}": value for task, value in tested.get("score", {}).items()}
        if values:  # none in a federation whose server has no test set
            self._each(lambda logger: logger.log(_clean(values), summary["rounds"]))

    def close(self) -> None:
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in list(self.opened):
            try:
                call(logger)
            except Exception as error:  # a lost connection, a full quota, …
                self.console.warn(f"{name} stopped taking figures ({first_line(error)}); metrics.jsonl goes on.")
                self.opened.remove((name, logger))


def require_loggers(names: Sequence[str]) -> None:
    """Say before anything long starts that a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"loggers=[{name}] needs a package: pip install 'fedweave[{name}]'.")


def open_loggers(config: Config, folder: Path, first_step: int, console: Console) -> Loggers:
    """Start, or continue, this run in every tracker that the config names."""
    opened = []
    for name in config.loggers:
        try:
            opened.append((name, LOGGERS[name](config, folder, first_step)))
        except Exception as error:
            console.warn(f"{name} cannot be used ({first_line(error)}); metrics.jsonl is written as always.")
    return Loggers(opened, console)


def scalars(event: Event) -> dict[str, float]:
    """An event as names with slashes: train/loss, validation/loss/gsm8k, experts/load/0, client/a/loss."""
    out: dict[str, float] = {}
    if event["event"] == "round":
        out |= {"train/tokens": event["tokens"]}
        if event["train_loss"] is not None:
            out["train/loss"] = event["train_loss"]
        out["communication/up_mb"] = sum(event["bytes_up"].values()) / 1e6
        out["communication/down_mb"] = len(event["participants"]) * event["bytes_down"] / 1e6
        if len(event["client_losses"]) <= _MANY_CLIENTS:
            out |= {f"client/{name}/loss": loss for name, loss in event["client_losses"].items()}
            out |= {f"client/{name}/agreement": c for name, c in event["agreement"].items() if c is not None}
    elif event["event"] == "setback":
        out["train/pace"] = event["pace"]
    elif event["event"] == "change":
        out |= {"experts/count": event["experts"], "data/came": sum(event["came"].values())}
        out["data/went"] = sum(event["went"].values())
    elif event["event"] == "validation":
        out["validation/loss"] = event["loss"]
        out |= {} if event["router_entropy"] is None else {"router/entropy": event["router_entropy"]}
        out |= {f"validation/loss/{task}": loss for task, loss in event.get("tasks", {}).items()}
        out |= {f"validation/site/{name}": loss for name, loss in event.get("sites", {}).items()}
        out |= {f"validation/score/{task}": score for task, score in event.get("scores", {}).items()}
        out |= {f"experts/load/{m}": share for m, share in enumerate(event.get("expert_load", []))}
    return _clean(out)


def _clean(values: dict[str, float]) -> dict[str, float]:
    """Client names are file names and may hold what MLflow refuses."""
    return {re.sub(r"[^\w\-. /]", "_", name): float(value) for name, value in values.items()}


def _remembered(folder: Path, name: str, make: Callable[[], str]) -> str:
    """The run's identity in a tracker, kept in loggers.json so that a resumed run continues its curves."""
    file = folder / "loggers.json"
    known = read_json(file, dict[str, str], "remove it to begin new curves") or {}
    if name not in known:
        known[name] = make()
        write_json(file, known)
    return known[name]
