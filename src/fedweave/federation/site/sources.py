"""Where a site's rows and model come from: its own files, or its share of a simulated federation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fedweave.config import BackboneConfig, Config
from fedweave.data import load_data
from fedweave.data.examples import Example
from fedweave.data.own import hold_out, read_examples
from fedweave.errors import UserError
from fedweave.federation.site.settings import SiteConfig
from fedweave.streams import stream_key


class Source(Protocol):
    """What differs between a real site and a simulated one."""

    name: str
    state: Path | None  # where private parameters are kept; None: in memory

    def backbone(self, config: BackboneConfig) -> BackboneConfig:
        """The federation's backbone as this site loads it."""

    def rows(self, config: Config, index: int) -> tuple[list[Example], list[Example]]:
        """Training and validation rows of client ``index``."""

    def labels(self, config: Config) -> list[str] | None:
        """The names of all kinds, for upper bounds that are told them; None: a real site knows no such list."""


class OwnFiles:
    """A real site."""

    def __init__(self, site: SiteConfig):
        self.site, self.name = site, site.name
        self.state: Path | None = Path(site.state)

    def backbone(self, config: BackboneConfig) -> BackboneConfig:
        own = self.site.backbone
        return replace(config, model=own.model, revision=own.revision, device=own.device, dtype=own.dtype)

    def rows(self, config: Config, index: int) -> tuple[list[Example], list[Example]]:
        rows = read_examples(_existing(self.site.data, "data"))
        if not rows:
            raise UserError(f"{self.site.data} is empty; add examples.")
        if self.site.validation:
            return rows, read_examples(_existing(self.site.validation, "validation"))
        held: dict[str, list[Example]] = {"validation": []}
        key = stream_key("holdout", config.seed, index)
        return hold_out(rows, ["validation"], held, config.data.holdout, key), held["validation"]

    def labels(self, config: Config) -> list[str] | None:
        return None


class Share:
    """Client ``index`` of a simulation; the validation examples are dealt out, so that their mean is the same."""

    state: Path | None = None

    def __init__(self, config: Config, index: int):
        self.config, self.data = config, load_data(config)
        self.index, self.name = index, list(self.data.clients)[index]

    def backbone(self, config: BackboneConfig) -> BackboneConfig:
        return config

    def rows(self, config: Config, index: int) -> tuple[list[Example], list[Example]]:
        return self.data.clients[self.name], self.data.validation[self.index :: len(self.data.clients)]

    def labels(self, config: Config) -> list[str] | None:
        return self.data.kinds()


def _existing(name: str, key: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{key}: there is no file {path}.")
    return path
