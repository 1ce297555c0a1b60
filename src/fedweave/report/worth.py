"""The chapter that says whether it was worth it."""

from fedweave.analysis.worth import CAVEAT, Figure, Worth, answer, kinds, read_worth, rows, value, verdict
from fedweave.console import table
from fedweave.report.enlist import Finding
from fedweave.report.parts import Section, Table
from fedweave.report.style import MUTED, Picture, canvas, colour, legend, named_rows
from fedweave.runs.reading import RunRecord

_LEVELS = {"better": "good", "worse": "warning", "unclear": "note"}
_TITLES = {"alone": "Against every client alone", "one adapter": "Against one shared adapter"}
_MARKS = {"alone": "s", "one adapter": "^", "ours": "o"}


def was_it_worth_it(lead: RunRecord) -> Section:
    section = Section("worth", "Was it worth it?")
    found = read_worth(lead.path)
    if found is None:
        section.lacks(
            lead.best is not None and not lead.elsewhere,
            f"whether it was worth it: fedweave worth {lead.path} trains each client alone and one shared adapter.",
        )
        return section
    section.intro = CAVEAT
    for name, figures in found["against"].items():
        level = next((_LEVELS[verdict(one)] for one in figures if verdict(one) != "unclear"), "note")
        section.findings.append(Finding(level, _TITLES[name], answer({name: figures}, found["experts"])))
    for figure in kinds(found):
        section.show(_by_client(found, figure))
        header, body = rows(found, figure)
        if len(body) > 13:
            section.folded.append({"title": f"{figure} of all clients", "text": table(header, body)})
        else:
            section.tables.append(Table(header, body, best=len(body) - 1))
    return section


def _by_client(found: Worth, figure: Figure) -> Picture:
    """Every client's figure under all methods."""
    clients = list(found["clients"])
    picture, ax = canvas(height=max(2.2, 1.1 + 0.3 * len(clients)))
    for y, measured in enumerate(found["clients"].values()):
        values = [value(one, figure) for one in measured.values()]
        ax.plot([min(values), max(values)], [y, y], color=MUTED, alpha=0.4, linewidth=2)
    names = list(next(iter(found["clients"].values())))
    for i, name in enumerate(names):
        values = [value(measured[name], figure) for measured in found["clients"].values()]
        label = found["method"] if name == "ours" else name
        ax.plot(values, range(len(clients)), _MARKS[name], color=colour(i), markersize=7, label=label)
    named_rows(ax, clients, f"test {figure}")
    legend(ax)
    side = "right" if figure == "score" else "left"
    return Picture(f"worth-{figure}", f"Test {figure} of every client", f"Further {side} is better.", picture)
