"""The life of a federation: which experts there were in which rounds, who fed them, what happened in between."""

from dataclasses import dataclass, field

from fedweave.events import ChangeEvent, PlacedBucket
from fedweave.report.parts import Section, Table
from fedweave.report.style import SURFACE, Picture, canvas, colour, named_rows, tip, whole_rounds
from fedweave.runs.reading import RunRecord


@dataclass
class Life:
    """One expert from its opening to its end."""

    number: int  # that it had when it opened; numbers move up when others close
    opened: int  # the first round with it
    stretches: list[tuple[int, int]] = field(default_factory=list)  # (from this round on, examples that feed it)
    feeders: dict[int, list[str]] = field(default_factory=dict)  # from this round on, by whom
    closed: int | None = None  # the first round without it
    end: str = ""

    @property
    def rounds(self) -> str:
        return f"{self.opened} to {self.closed - 1}, {self.end}" if self.closed else f"{self.opened} on"

    @property
    def fed_by(self) -> list[str]:
        """Whoever had rows for it when something last changed."""
        return self.feeders[max(self.feeders)] if self.feeders else []

    @property
    def name(self) -> str:
        return f"expert {self.number}" + (f", round {self.opened}" if self.opened > 1 else "")


def lives(run: RunRecord) -> list[Life]:
    """All experts that there ever were."""
    feeding = [sum(column) for column in zip(*run.feeding.values(), strict=True)] or [0] * run.aligned
    now = [Life(m, 1, [(1, fed)], {1: _feeders(run, m)}) for m, fed in enumerate(feeding)]
    everyone = list(now)
    for event in run.changes:
        start = event["round"]
        born = [Life(m, start) for m in event["opened"]]
        now += born
        everyone += born
        gone: list[tuple[int, str]] = [(m, "merged") for m in event["merged"]]
        if gone:
            one = Life(len(now) - len(gone), start)
            now.append(one)
            everyone.append(one)
        now = _without(now, gone, start)
        now = _without(now, [(m, "retired") for m in event["retired"]], start)
        now = _without(now, [(m, "closed") for m in event.get("closed", [])], start)
        for life, fed, names in zip(now, event["fed"], event.get("feeders") or [[] for _ in now], strict=True):
            life.stretches.append((start, fed))
            life.feeders[start] = names
    return everyone


def _feeders(run: RunRecord, m: int) -> list[str]:
    """The clients with examples of an expert at alignment."""
    return [name for name, fed in run.feeding.items() if m < len(fed) and fed[m]]


def _without(now: list[Life], gone: list[tuple[int, str]], start: int) -> list[Life]:
    for m, end in gone:
        now[m].closed, now[m].end = start, end
    return [life for life in now if life.closed is None]


def happened(event: ChangeEvent) -> list[str]:
    """A change in words, for people."""
    said = []
    if event["came"]:
        said.append(f"{sum(event['came'].values())} rows came to {_names(event['came'])}")
    if event["went"]:
        said.append(f"{sum(event['went'].values())} rows left {_names(event['went'])}")
    for m in event["opened"]:
        own = [bucket for bucket in event["placed"] if bucket["expert"] == m]
        rows, near = sum(bucket["rows"] for bucket in own), min(bucket["distance"] for bucket in own)
        clients = _names({bucket["client"]: 0 for bucket in own})
        far = f"{near:.2f} from any other, limit {event['limit']:.2f}"
        said.append(f"expert {m} opened for {rows} rows of {clients}: {far}")
    apart: dict[str, list[PlacedBucket]] = {}  # by what they wait for
    for bucket in event["placed"]:
        if bucket["expert"] < 0:
            apart.setdefault(bucket.get("waits", "living.notice=open"), []).append(bucket)
    for key, own in apart.items():
        rows, clients = sum(bucket["rows"] for bucket in own), _names({bucket["client"]: 0 for bucket in own})
        what = f"resume with {key} to open one" if key else "too few to open one until more of their kind come"
        said.append(f"{rows} rows of {clients} fit no expert and are kept apart; {what}")
    if event["merged"]:
        said.append(f"experts {' and '.join(map(str, event['merged']))} became one")
    said += [f"expert {m} was retired: nobody fed it" for m in event["retired"]]
    said += [f"expert {m} lost a vote on its prompts and closed" for m in event.get("closed", [])]
    said += ["the router was warmed up anew, by those who count"] if event.get("restarted") else []
    said += [f"nobody who is here feeds expert {m} any more; it stays as it is" for m in event.get("unfed", [])]
    said += [f"expert {m} is fed again" for m in event.get("fed_again", [])]
    return said


def _names(clients: dict[str, int], most: int = 4) -> str:
    names = list(clients)
    return ", ".join(names[:most]) + (f" and {len(names) - most} others" if len(names) > most else "")


def timeline(run: RunRecord) -> Picture | None:
    """A bar for every expert over the rounds that it was there, pale where nobody fed it."""
    if not run.changes:
        return None
    found, last = lives(run), max(run.completed, 1)
    figure, ax = canvas(width=8.6, height=0.9 + 0.34 * len(found))
    for row, life in enumerate(found):
        starts = [*(start for start, _ in life.stretches), life.closed or last + 1]
        for (start, fed), end in zip(life.stretches, starts[1:], strict=True):
            (bar,) = ax.barh(
                row, end - start, 0.7, start - 0.5, color=colour(row), edgecolor=SURFACE, alpha=1.0 if fed else 0.25
            )
            names = dict.fromkeys(life.feeders.get(start, []), 0)
            whose = f" of {_names(names)}" if fed and names else ""
            bar.set_gid(tip(f"{life.name}, round {start} on: {fed} examples{whose}", expert=row))
        if life.end:
            ax.text(starts[-1] - 0.4, row, life.end, va="center", fontsize=9)
    named_rows(ax, [life.name for life in found], "")
    ax.set_xlim(0.5, last + 0.5)
    whole_rounds(ax)
    caption = "From the round in which an expert opened; pale: nobody fed it, and it stayed as it was to the bit."
    return Picture("timeline", "The life of the experts", caption, figure)


def life(lead: RunRecord) -> Section:
    """The chapter; empty where nothing changed."""
    section = Section("life", "What changed in mid-run").show(timeline(lead))
    rows = [[str(event["round"]), line] for event in lead.changes for line in happened(event)]
    if rows:
        section.tables.append(Table(["before round", "what happened"], rows, prose=True))
        fed = [[one.name, one.rounds, _names(dict.fromkeys(one.fed_by, 0)) or "nobody"] for one in lives(lead)]
        section.tables.append(Table(["expert", "rounds", "fed by, at last"], fed, prose=True))
    return section
