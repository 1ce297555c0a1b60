"""Rules that span several keys of the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedweave.errors import UserError, nearest
from fedweave.registry import METHODS, PRIVATE, SUMMED

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
    if config.attack.kind != "none" and (data.source in ("jsonl", "sites") or config.engine != "in-process"):
        raise UserError("attack is for simulations: it needs data.source=sample, paper or tasks, and this process.")
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
    if config.privacy.level != "none":
        _check_private(config)
    if config.federation.secure_aggregation:
        _check_masked(config)
    if config.method not in METHODS:
        raise UserError(f"method={config.method!r} is unknown: {nearest(config.method, METHODS)}")


def _check_private(config: Config) -> None:
    """Whatever would tell of the data beside the clip and the noise."""
    level, router = config.privacy.level, config.router
    if config.method not in PRIVATE:
        able = ", ".join(PRIVATE)
        raise UserError(f"privacy.level={level} has no guarantee for method={config.method}; choose one of {able}.")
    aligned = bool(PRIVATE[config.method])
    clusters = aligned and config.method != "fedlease"
    plays_clients = config.data.source != "sites" and config.engine == "in-process"
    for broken, sentence in (
        (
            clusters and config.discovery.max_buckets > 1,
            "needs discovery.max_buckets=1: how a client's prompts fall into buckets follows from all of them at "
            "once, which no clip bounds",
        ),
        (
            level == "client" and config.method == "fedlease",
            "does not go with fedlease, whose routers vote by numbers of examples; use method=fedweave",
        ),
        (
            level == "client" and config.method == "fedsa-lora" and plays_clients,
            "does not go with fedsa-lora in one process: its model would hold the mean of what clients keep, which "
            "has no noise; use engine=flower, where nobody has such a model, or privacy.level=example",
        ),
        (
            aligned and not config.discovery.sketch,
            "needs signatures that are sketches, since noise grows with length: set discovery.sketch, as in 4",
        ),
        (
            aligned and config.experts.labels == "router",
            "needs experts.labels=buckets: what the router makes of a client's prompts would be told",
        ),
        (
            aligned and router.familiar not in ("auto", 1.0),
            "needs router.familiar=1 or auto: sums of features would leave the clients",
        ),
        (config.lives, "plans for data that stay as they are; leave data.changes empty and living.notice=off"),
        (
            config.data.source == "sites" and bool(config.federation.repeats),
            "needs federation.repeats=0: a round that is asked twice is spent twice",
        ),
    ):
        if broken:
            raise UserError(f"privacy.level={level} {sentence}.")


def _check_masked(config: Config) -> None:
    """Whatever needs a single client's answer, where the server sees sums alone."""
    federation, clients = config.federation, config.data.clients
    if config.data.source == "sites":
        clients = federation.sites or 3
    share = config.training.participation
    clients = min(clients, max(1, round(share * clients)) if share <= 1 else int(share))  # of a round
    for broken, sentence in (
        (config.method not in SUMMED, f"sums updates alone, as {', '.join(SUMMED)} do; {config.method} does not"),
        (
            federation.rule not in ("auto", "mean"),
            f"hides what federation.rule={federation.rule} compares, every client's own update; set it to mean",
        ),
        (federation.max_share not in ("auto", 1.0), "hides who counts how much; set federation.max_share=1"),
        (federation.quarantine > 0, "hides who pulls against the others; set federation.quarantine=0"),
        (federation.update_dtype != "float32", "has its own encoding; set federation.update_dtype=float32"),
        (config.experts.labels == "router", "does not hide each bucket's expert; set experts.labels=buckets"),
        (config.lives, "sums over clients that stay as they are; leave data.changes empty and living.notice=off"),
        (clients < 3, "needs three clients in every round: a sum of two tells each of the other"),
    ):
        if broken:
            raise UserError(f"federation.secure_aggregation {sentence}.")
