"""Rules that span several keys of the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedweave.errors import UserError, nearest
from fedweave.registry import METHODS

if TYPE_CHECKING:
    from fedweave.config import Config


def check_together(config: Config) -> None:
    """One sentence for the first that is broken."""
    data, training = config.data, config.training
    if data.source == "jsonl" and not data.path:
        raise UserError("data.source=jsonl needs data.path: a folder with one file per client, or a file.")
    if data.source == "tasks" and not data.path:
        raise UserError("data.source=tasks needs data.path: a folder with tasks.jsonl and files of rows.")
    if data.wording == "varied" and data.source not in ("paper", "tasks"):
        raise UserError(f"data.wording=varied needs data.source=paper or tasks, not {data.source}.")
    if data.changes and data.source not in ("sample", "paper", "tasks"):
        raise UserError(f"data.changes needs data.source=sample, paper or tasks, not {data.source}.")
    if config.init and config.engine == "flower":
        raise UserError("init starts federations of this process only; use engine=in-process.")
    if data.source in ("sample", "sites") and data.path:
        raise UserError(f"data.path is not used by data.source={data.source}; set data.source=jsonl or paper.")
    for key, value in (
        ("training.clients_per_step", training.clients_per_step),
        ("evaluation.batch_size", config.evaluation.batch_size),
    ):
        if value != "auto" and int(value) < 1:
            raise UserError(f"{key} must be auto or at least 1, not {value}.")
    if training.participation > 1 and training.participation != int(training.participation):
        raise UserError("training.participation above 1 is a count of clients and must be a whole number.")
    experts = config.experts
    if experts.shared_rank % experts.rank:
        raise UserError(
            f"experts.shared_rank={experts.shared_rank} must be a multiple of experts.rank={experts.rank}, or 0."
        )
    alone = {"router.gate=sure": config.router.gate == "sure", "experts.rest": experts.rest > 0}
    for key, asked in alone.items():
        if asked and not experts.shared_rank:
            raise UserError(f"{key} needs a part that experts share: set experts.shared_rank, as in 32.")
    if config.method not in METHODS:
        raise UserError(f"method={config.method!r} is unknown: {nearest(config.method, METHODS)}")
