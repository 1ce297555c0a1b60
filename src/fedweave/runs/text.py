"""The last thing a run prints: scores, losses, who answers what, and where the time went."""

from collections.abc import Mapping, Sequence

from fedweave.console import columns_of, shade, table
from fedweave.description.record import Experts, title
from fedweave.description.text import words_of
from fedweave.schema import Audit, ByTask, PrivacyFigures, Summary, Tested

AUDIT = ["purity", "NMI", "ARI"]
FEW_TASKS = 12  # so many have a place each in tables of all of them; of more one reads means
DECIDED = 0.95  # of a kind's prompts to one expert: its routing is decided


def summary_text(summary: Summary, experts: Experts | None = None) -> str:
    """A summary as text, with what is known of the experts."""
    tested, chosen = summary["test"], summary["validation"]
    early = " (it ended early)" if summary.get("ended_early") else ""
    parts = [
        "",
        f"{summary['method']} · {summary['backbone']['model']} · {summary['clients']} clients · "
        f"{summary['examples']} examples · {summary['buckets']} buckets → {summary['experts']} "
        f"{'experts' if summary['experts'] > 1 else 'expert'} · "
        f"best of {summary['rounds']} rounds{early}: {chosen['best_round']}",
        "",
    ]
    if "best" in tested:
        bare = tested["untouched"]["loss"] if "untouched" in tested else None
        parts.append(results_table(tested["best"], summary["tasks"], bare))
        if summary["experts"] > 1 and len(summary["tasks"]) <= FEW_TASKS:
            parts += ["", _routing(summary, tested["best"])]
            if strange := [summary["tasks"][task] for task in strange_tasks(tested["best"]["routing"])]:
                parts.append(f"most prompts are strange to the router and get no expert: {', '.join(strange)}")
        if "decided" in tested["best"]:
            parts += ["", f"routing decided: {decided_text(tested['best']['decided'])}"]
        if unseen := tested.get("unseen"):
            bare = tested.get("untouched", {}).get("unseen")
            parts += ["", results_table(unseen, summary.get("unseen_tasks", {}), bare, "unseen tasks")]
    elif chosen["best_loss"] < 0:  # a loss that nobody measured counts rounds down
        parts.append("no site measured a validation loss")
    else:
        parts.append(f"validation loss of all sites: {chosen['best_loss']:.3f}")
    if experts and summary["experts"] > 1:
        parts += ["", _experts(experts)]
    if summary["audit"]:
        audits = audit_rows(summary["audit"], summary.get("kind_audit"))
        parts += ["", table(["alignment audit", *AUDIT], audits)]
    if "privacy" in summary:
        parts += ["", privacy_text(summary["privacy"])]
    parts += [""] + [f"note: {note}" for note in summary["notes"]]
    if "timing" in summary:
        parts.append(f"time: {summary['timing']['total_s']:.0f} s")
    return "\n".join(parts)


def privacy_text(private: PrivacyFigures) -> str:
    """A guarantee and what is spent of it, as one line."""
    low, high = private["noise"]
    noise = f"{low:.3g}" if high - low < 0.01 * high else f"{low:.3g} to {high:.3g}"
    whom = "client with all that it has" if private["level"] == "client" else "single example"
    return (
        f"differential privacy of every {whom}: ε ≤ {private['epsilon']:g} at δ = {private['delta']:g}, "
        f"{private['spent']:.2f} spent; noise {noise} times the clip of {private['clip']:g}"
    )


def results_table(tested: Tested, titles: Mapping[str, str], bare: ByTask | None = None, what: str = "test") -> str:
    """Scores and losses of every task, beside the untouched model's where they are known."""
    scored, used = tested.get("score"), tested["used"]
    header = [what, *([f"score {used} ↑"] if scored else []), *(f"loss {r} ↓" for r in tested["loss"])]
    header += ["loss untouched"] if bare else []
    rows = []
    for task in rows_of(tested["loss"][used]):
        row = [titles.get(task, "macro average"), *([f"{scored[task]:.3f}"] if scored else [])]
        row += [f"{losses[task]:.3f}" for losses in tested["loss"].values()]
        rows.append([*row, *([f"{bare[task]:.3f}"] if bare else [])])
    return table(header, rows)


def rows_of(figures: ByTask) -> list[str]:
    """The rows of a table by task: with several tasks their mean stands below."""
    return list(figures) if len(figures) > 2 else [task for task in figures if task != "macro"]


def audit_rows(audit: Audit, kinds: Audit | None = None) -> list[list[str]]:
    """Purity, NMI and ARI of buckets and of experts, and against kinds where these are not the tasks."""
    levels = {"local": audit["local"], "global": audit["global"]}
    if kinds:
        levels |= {"local, by kind": kinds["local"], "global, by kind": kinds["global"]}
    return [
        [level, f"{found['purity']:.3f}", f"{found['nmi']:.3f}", f"{found['ari']:.3f}"]
        for level, found in levels.items()
    ]


def _experts(found: Experts) -> str:
    """Who gets which prompts: a line for each, whether rows have labels or not."""
    titles = [title(found, m) for m in range(len(found["experts"]))]
    width = max(map(columns_of, titles))
    lines = ["  words that set apart the prompts of"]
    for name, expert in zip(titles, found["experts"], strict=True):
        blank = " " * (width - columns_of(name))
        lines.append(f"  {name}{blank}  {expert['share']:4.0%}  {', '.join(words_of(found, expert))}")
    return "\n".join(lines)


def decided_text(decided: Mapping[str, float]) -> str:
    """How much of every kind one expert answers, in one sentence."""
    least = min(decided, key=lambda kind: decided[kind])
    enough = sum(share >= DECIDED for share in decided.values())
    return (
        f"{enough} of {len(decided)} kinds have {DECIDED:.0%} or more of their prompts answered by one expert; "
        f"the least is {least} with {decided[least]:.1%}"
    )


def strange_tasks(table: Mapping[str, Sequence[float]]) -> list[str]:
    """Tasks most of whose prompts are like none before to the router: they get no weight, so that a task's weights
    sum up to the share of its prompts that are familiar."""
    return [task for task, weights in table.items() if sum(weights) < 0.5]


def _routing(summary: Summary, best: Tested) -> str:
    experts = [f"expert {m}" for m in range(summary["experts"])]
    rows = [[summary["tasks"][task], *map(shade, weights)] for task, weights in best["routing"].items()]
    return table(["router weights", *experts], rows)
