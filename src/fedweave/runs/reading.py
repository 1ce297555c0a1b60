"""A run's files as one record, for everything that looks at runs: reports, costs, model cards. It loads no model.

A run may be unfinished or under way; what it does not have yet is None or empty.
"""

import math
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fedweave.config import Config, load_config
from fedweave.errors import UserError
from fedweave.events import ChangeEvent, Event, RoundEvent, SetbackEvent, ValidationEvent
from fedweave.json_files import Damaged, parse, read_json
from fedweave.runs.live import read_live
from fedweave.schema import Audit, ByTask, ClientBuckets, Discovery, LiveState, Manifest, PromptMap, Summary, Tested


@dataclass
class RunRecord:
    """One run's files."""

    path: Path
    config: Config
    manifest: Manifest
    discovery: Discovery | None = None
    embedding: PromptMap | None = None
    summary: Summary | None = None
    live: LiveState | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def state(self) -> str:
        """finished, running or stopped."""
        return self.live["state"] if self.live else "finished" if self.summary else "stopped"

    @property
    def elsewhere(self) -> bool:
        """Whether the clients are sites of their own, which keep labels and features to themselves."""
        return self.config.engine == "flower"

    @property
    def resume(self) -> str:
        """The command that goes on with it."""
        return resume_command(self.path, self.config)

    # ---------------------------------------------------------------------------------- rounds

    @cached_property
    def rounds(self) -> list[RoundEvent]:
        return [e for e in self.events if e["event"] == "round"]

    @cached_property
    def validations(self) -> list[ValidationEvent]:
        """Those that measured something: sites may all be silent."""
        return [e for e in self.events if e["event"] == "validation" and e.get("sites") != {}]

    @cached_property
    def setbacks(self) -> list[SetbackEvent]:
        return [e for e in self.events if e["event"] == "setback"]

    @cached_property
    def changes(self) -> list[ChangeEvent]:
        """What changed in mid-run."""
        return [e for e in self.events if e["event"] == "change"]

    @property
    def between_rounds(self) -> int:
        """Bytes of all questions between rounds, both directions, whatever came of them."""
        asked = [e for e in self.events if e["event"] == "change" or e["event"] == "asked"]
        return sum(sum(sizes.values()) for e in asked for sizes in (e["bytes_up"], e["bytes_down"]))

    @property
    def best_validation(self) -> ValidationEvent | None:
        """The validation that chose the best round; of a run under way the lowest loss since the data last changed,
        the first of equals, as in training."""
        chosen = self.summary["validation"]["best_round"] if self.summary is not None else None
        if found := next((e for e in self.validations if e["round"] == chosen), None):
            return found
        return min(self.comparable, key=lambda e: e["loss"], default=None)

    @property
    def comparable(self) -> list[ValidationEvent]:
        """Validations since the data last changed: losses before that are of experts for other data."""
        other = ("came", "went", "placed", "merged", "retired", "closed", "restarted")  # as Change.__bool__
        since = max((event["round"] for event in self.changes if any(event.get(key) for key in other)), default=0)
        return [event for event in self.validations if event["round"] >= since]

    @property
    def completed(self) -> int:
        return self.rounds[-1]["round"] if self.rounds else 0

    @property
    def round_seconds(self) -> list[float]:
        return self.live["round_seconds"] if self.live else []

    @cached_property
    def agreement(self) -> dict[str, float]:
        """Mean cosine of every client's updates with the others' over all rounds."""
        seen: dict[str, list[float]] = {}
        for event in self.rounds:
            for name, cosine in event["agreement"].items():
                if cosine is not None:
                    seen.setdefault(name, []).append(cosine)
        return {name: sum(values) / len(values) for name, values in seen.items()}

    @property
    def expert_load(self) -> list[float]:
        """Share of prompts that sparse routing sends to each expert, at the last validation."""
        return self.validations[-1].get("expert_load", []) if self.validations else []

    @property
    def entropy(self) -> float | None:
        """Router entropy at the last validation as a share of its largest value, log M."""
        entropy = self.validations[-1]["router_entropy"] if self.validations else None
        return None if entropy is None or self.experts < 2 else entropy / math.log(self.experts)

    # ---------------------------------------------------------------------------------- discovery

    @property
    def tasks(self) -> dict[str, str]:
        """Task to title."""
        return self.manifest.get("tasks") or (self.summary["tasks"] if self.summary else {})

    @property
    def titles(self) -> dict[str, str]:
        """The rows of a table by task: with several tasks their mean stands below."""
        return {**self.tasks, "macro": "macro average"} if len(self.tasks) > 1 else dict(self.tasks)

    @property
    def experts(self) -> int:
        # the start is validated, and its experts' load logged, a moment before discovery.json is written
        if self.changes:
            return self.changes[-1]["experts"]
        return self.aligned or max(1, len(self.expert_load))

    @property
    def aligned(self) -> int:
        """M as alignment found it; more may have opened since. 0 before discovery."""
        return self.discovery["experts"] if self.discovery else 0

    @property
    def clients(self) -> dict[str, ClientBuckets]:
        """Every client's buckets; empty before discovery."""
        return self.discovery["clients"] if self.discovery else {}

    @property
    def audit(self) -> Audit | None:
        """How buckets and experts met the labels, where there are several of both."""
        return self.discovery.get("audit") if self.discovery and self.experts > 1 else None

    @property
    def kind_audit(self) -> Audit | None:
        """The same for kinds, where several tasks are one."""
        return self.discovery.get("kind_audit") if self.discovery and self.experts > 1 else None

    @property
    def silhouettes(self) -> dict[int, float]:
        """Of the alignment into M experts, for every M that was considered."""
        found = self.discovery.get("alignment_silhouettes", {}) if self.discovery else {}
        return {int(m): silhouette for m, silhouette in found.items()}

    @cached_property
    def mixture(self) -> dict[str, dict[str, int]]:
        """Examples of every client by task: from discovery's counts, else from where the rows came from."""
        if self.discovery and (known := self.discovery.get("bucket_tasks")):
            return {name: sum(map(Counter, buckets), Counter()) for name, buckets in known.items()}
        counts: dict[str, dict[str, int]] = {}
        for name, origins in self.manifest.get("clients", {}).items():
            parts = [origin.replace(":", "/").split("/") for origin in origins]
            found = [next((task for task in self.tasks if task in words), None) for words in parts]
            if None in found:
                return {}
            counts[name] = Counter(task for task in found if task is not None)
        return counts

    @cached_property
    def feeding(self) -> dict[str, list[int]]:
        """Examples that stood behind each expert at alignment, by client, [M] each."""
        out = {}
        for name, client in self.clients.items():
            row = [0] * self.aligned
            for size, expert in zip(client["buckets"], client["experts"], strict=True):
                if expert >= 0:  # a latecomer's bucket may fit no expert
                    row[expert] += size
            out[name] = row
        return out

    @property
    def fed(self) -> list[int]:
        """Examples of every expert that there is, [M], since something last changed."""
        if self.changes:
            return self.changes[-1]["fed"]
        return [sum(column) for column in zip(*self.feeding.values(), strict=True)]

    # ---------------------------------------------------------------------------------- the end

    @property
    def best(self) -> Tested | None:
        """The test of the best round."""
        return self.summary["test"].get("best") if self.summary else None

    @property
    def unseen(self) -> Tested | None:
        """The same on tasks that nobody trained on."""
        return self.summary["test"].get("unseen") if self.summary else None

    @property
    def untouched(self) -> ByTask | None:
        """Test losses of the bare backbone."""
        bare = self.summary["test"].get("untouched") if self.summary else None
        return bare["loss"] if bare else None

    @property
    def untouched_unseen(self) -> ByTask | None:
        bare = self.summary["test"].get("untouched") if self.summary else None
        return bare.get("unseen") if bare else None

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds of every phase; empty before the end."""
        return self.summary["timing"]["phases_s"] if self.summary else {}


def resume_command(folder: Path, config: Config, link: str = "…") -> str:
    """What to type to go on. Over sites that takes the options of the ``link`` to them, of which a run's folder
    knows nothing: they belong to the machine."""
    name = shlex.quote(str(folder))
    return (
        f"fedweave federate --resume {name} {link}" if config.data.source == "sites" else f"fedweave resume {name}"
    )


def read_run(folder: Path) -> RunRecord:
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is no run folder: it has no config.yaml.")
    manifest = read_json(folder / "manifest.json", Manifest, "restore it and try again")
    if manifest is None:
        raise UserError(f"{folder} is no whole run folder: it has no manifest.json.")
    config = load_config(folder / "config.yaml")
    again = f"`{resume_command(folder, config)}` writes it again"
    return RunRecord(
        path=folder,
        config=config,
        manifest=manifest,
        discovery=read_json(folder / "discovery.json", Discovery, again),
        embedding=read_json(folder / "embedding.json", PromptMap, again),
        summary=read_json(folder / "summary.json", Summary, again),
        live=read_live(folder),
        events=read_events(folder / "metrics.jsonl"),
    )


def read_events(path: Path) -> list[Event]:
    """Events so far; the last line of a run under way may be half written."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith(b"\n"):
            break
        try:
            events.append(parse(line, Event))  # type: ignore[arg-type]
        except Damaged as error:
            raise UserError(f"{path}, line {number} is damaged ({error}); restore the file.") from None
    return events
