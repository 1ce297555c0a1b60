"""Where a site's rows come from: its own files, or its share of a simulated federation."""

from dataclasses import replace
from pathlib import Path

from fedweave.config import BackboneConfig, Config
from fedweave.data import load_data
from fedweave.data.examples import Example
from fedweave.data.own import hold_out, read_examples
from fedweave.data.rows import read_fields
from fedweave.errors import UserError
from fedweave.federation.site.feed import Split
from fedweave.federation.site.settings import Floors, SiteConfig, own_files
from fedweave.streams import stream_key


class OwnFiles:
    """A real site."""

    secret = True  # nobody else knows its noise

    def __init__(self, site: SiteConfig):
        self.site, self.name, self.floors = site, site.name, site.floors
        self.splits = not site.validation
        self.state: Path | None = Path(site.state)  # where private parameters are kept; None: in memory
        self._seen: tuple[int, int] | None = None  # when the file was last written, and its size, at the last look

    def backbone(self, config: BackboneConfig) -> BackboneConfig:
        """The federation's backbone as this site loads it."""
        return replace(config, **own_files(self.site.backbone))

    def rows(self, config: Config, index: int) -> tuple[list[Example], list[Example]]:
        """Training and validation rows of client ``index``."""
        rows = self._read()
        if self.site.validation:
            return rows, self._rows_of(self.site.validation, "validation")
        return self.split(config, index, rows)

    def everything(self) -> list[Example]:
        rows, self._seen = self._read(), None
        return rows

    def look(self, index: int, t: int) -> list[Example] | None:
        return None if self._seen == _written(_existing(self.site.data, "data")) else self._read()

    def _read(self) -> list[Example]:
        path = _existing(self.site.data, "data")
        self._seen = _written(path)
        rows = self._rows_of(self.site.data, "data")
        if _written(path) != self._seen:  # the rows that are still to be written would count as gone
            raise UserError(f"{self.site.data} was written while it was read.")
        return rows

    def _rows_of(self, name: str, key: str) -> list[Example]:
        rows = read_examples(_existing(name, key), read_fields(self.site.fields, "`fields` in the site's file"))
        if not rows:
            raise UserError(f"{key}: {name} is empty; add examples.")
        return rows

    def split(self, config: Config, index: int, rows: list[Example], version: int = 0) -> Split:
        """Rows kept back for validation, unless the site has a file of them."""
        if self.site.validation:
            return rows, []
        held: dict[str, list[Example]] = {"validation": []}
        key = stream_key("holdout", config.seed, index, *([version] if version else []))
        return hold_out(rows, ["validation"], held, config.data.holdout, key), held["validation"]

    def labels(self, config: Config) -> list[str] | None:
        """The names of all kinds, for upper bounds that are told them; a real site knows no such list."""
        return None


class Share:
    """Client ``index`` of a simulation; the validation examples are dealt out, so that their mean is the same."""

    splits = False
    secret = False  # a simulation gives the same figures again
    floors = Floors(batch=1, clip=0.0)  # a simulation has nobody to protect

    def __init__(self, config: Config, index: int, state: Path | None = None):
        self.config, self.data, self.state = config, load_data(config), state
        self.index, self.name = index, list(self.data.clients)[index]

    def backbone(self, config: BackboneConfig) -> BackboneConfig:
        return config

    def rows(self, config: Config, index: int) -> tuple[list[Example], list[Example]]:
        return self.data.clients[self.name], self.data.validation[self.index :: len(self.data.clients)]

    def everything(self) -> list[Example]:
        course = self.data.courses.get(self.name)
        return course.rows if course else self.data.clients[self.name]

    def look(self, index: int, t: int) -> list[Example] | None:
        course = self.data.courses.get(self.name)
        return [course.rows[i] for i in course.here[course.last(t)]] if course else None

    def split(self, config: Config, index: int, rows: list[Example], version: int = 0) -> Split:
        return rows, []

    def labels(self, config: Config) -> list[str] | None:
        return self.data.kinds()


Source = OwnFiles | Share


def _written(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _existing(name: str, key: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{key}: there is no file {path}.")
    return path
