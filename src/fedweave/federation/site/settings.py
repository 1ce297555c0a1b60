"""What a site decides for itself: where its data and model are, and whom it joins. It never leaves the site."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fedweave.config import BackboneConfig
from fedweave.data.files import find_path
from fedweave.errors import UserError
from fedweave.files import read_text
from fedweave.settings import build, read_yaml, setting


@dataclass(frozen=True)
class ModelSettings:
    """This site's copy of the federation's backbone."""

    model: str = setting("HuggingFaceTB/SmolLM2-135M-Instruct", "Local folder, .gguf file or hub id.")
    revision: str | None = setting(None, "Branch, tag or commit of a hub model.")
    device: str = setting("auto", "auto (CUDA when there is one), cpu, cuda or cuda:N.")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Weights of the backbone: auto is bfloat16 on CUDA and float32 on a CPU; docs/performance.md says more.",
    )
    weights: Literal["dense", "stored", "nf4", "nf4-double"] | None = setting(
        None, "How they stay in memory (docs/backbones.md), where that is not for the federation to say."
    )
    download: bool = setting(False, "Let the model be fetched once; without it nothing calls out.")


def own_files(settings: ModelSettings | BackboneConfig) -> dict[str, Any]:
    """The part of a backbone's settings that is a site's own, and never the federation's; how weights stay in
    memory is only where it says so."""
    own = {key: getattr(settings, key) for key in ("model", "revision", "device", "dtype")}
    weights = settings.weights if isinstance(settings, ModelSettings) else None
    return own if weights is None else own | {"weights": weights}


@dataclass(frozen=True)
class LinkSettings:
    """The SuperLink that this site joins."""

    address: str = setting("127.0.0.1:8000", "Host and port of the SuperLink.")
    root_certificates: str | None = setting(
        None, "The certificate authority that signed the SuperLink's certificate."
    )
    private_key: str | None = setting(
        None, "This site's private key; its public half is registered at the SuperLink."
    )
    insecure: bool = setting(False, "Speak without TLS and without a key: for a try on one machine only.")
    port: int = setting(9094, "Port on 127.0.0.1 between SuperNode and worker.", low=1, high=65535)


@dataclass(frozen=True)
class Floors:
    """What this site does not do, whatever a server asks: with one example, one step and a tiny clip an answer
    would hold that example's feature. A question below a floor is refused and logged here."""

    bucket: int = setting(
        1,
        "Fewest different rows that an expert's update or signature rests on: smaller buckets join the nearest.",
        low=1,
    )
    batch: int = setting(
        2, "Smallest batch in warmups, the router's too, and in rounds; no bucket is smaller.", low=1
    )
    steps: int = setting(1, "Fewest local steps of a round or a warmup.", low=1)
    clip: float = setting(1e-3, "Smallest training.clip.", low=0.0)
    level: Literal["none", "example", "client"] = setting(
        "none", "Least protection, in this order: a federation with a lower privacy.level is refused."
    )
    secure: bool = setting(False, "Take part with secure aggregation only.")
    epsilon: float = setting(
        1e6, "Most that all federations of this site may spend together, each its privacy.epsilon.", low=0.0
    )
    delta: float = setting(1e-5, "Largest privacy.delta of a federation with noise.", low=0.0, high=1.0)
    questions: tuple[str, ...] = setting(
        (), "The questions that are answered, as in [hello, train]; all when empty."
    )
    rounds: int = setting(10_000, "Most answers to any one question, of all federations together.", low=0)
    fingerprint: str = setting(
        "", "The one backbone that is used, as `fedweave site check` prints it; any when empty."
    )

    @property
    def least(self) -> int:
        """Of the examples that an answer rests on: a smaller bucket's batches would be smaller than they may be."""
        return max(self.bucket, self.batch)


@dataclass(frozen=True)
class SiteConfig:
    name: str = setting("", "The site's name in the federation; it must not change.")
    data: str = setting("", "File of training rows: JSONL, CSV, TSV or Parquet.")
    validation: str | None = setting(None, "File to validate on; without it a share of data is kept back.")
    fields: tuple[str, ...] = setting(
        (), "Names of this site's columns, as in {prompt: question, response: answer}.", pairs=True
    )
    state: str = setting("state", "Folder for keys of the local link and for parameters that never leave.")
    backbone: ModelSettings = field(default_factory=ModelSettings)
    superlink: LinkSettings = field(default_factory=LinkSettings)
    floors: Floors = field(default_factory=Floors)


def load_site(path: Path) -> SiteConfig:
    """A site's YAML file; relative paths in it count from its folder."""
    if not path.is_file():
        raise UserError(f"there is no site file {path}; examples/deployment/site.yaml is one to copy.")
    tree = read_yaml(read_text(path), str(path))
    config: SiteConfig = build(SiteConfig, tree, what="key of a site's file")
    if not config.name or not config.name.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"{path}: name must be letters, digits, - and _, not {config.name!r}.")
    if not config.data:
        raise UserError(f"{path}: data is missing; it names the file of this site's rows.")
    link = config.superlink
    if not link.insecure and not (link.root_certificates and link.private_key):
        raise UserError(
            f"{path}: superlink needs root_certificates and private_key (make-certificates.sh makes them), or "
            "insecure: true for a try on one machine."
        )

    def found(settings: SiteConfig | LinkSettings, *keys: str) -> dict[str, Any]:
        """Paths of these keys, where they are set."""
        given = {key: getattr(settings, key) for key in keys}
        return {key: str(folder / Path(name).expanduser()) for key, name in given.items() if name}

    folder, model = path.resolve().parent, config.backbone.model
    local = folder / Path(model).expanduser()
    return replace(
        config,
        **found(config, "data", "validation", "state"),
        backbone=replace(config.backbone, model=str(local) if local.exists() else model),
        superlink=replace(link, **found(link, "root_certificates", "private_key")),
    )


def check_link(link: LinkSettings) -> None:
    """What Flower's SuperNode would find out by itself: it would end, be started again, and end again."""
    host, _, port = link.address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"superlink.address={link.address} must be a host and a port, as in 127.0.0.1:8000.")
    for key, mark in {"root_certificates": "BEGIN CERTIFICATE", "private_key": "PRIVATE KEY"}.items():
        name = getattr(link, key)
        if link.insecure or not name:
            continue
        path = find_path(name, f"superlink.{key}=")
        if os.access(path, os.R_OK) and mark not in path.read_text(
            errors="replace"
        ):  # the key may be another user's
            what = "certificate" if key == "root_certificates" else "private key"
            raise UserError(
                f"superlink.{key}={name} holds no {what}; make-certificates.sh makes one for every site."
            )
