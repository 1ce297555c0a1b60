"""Findings on what changed in mid-run: whatever an operator should not have to look for in a table."""

from fedweave.events import PlacedBucket
from fedweave.report.enlist import finding
from fedweave.runs.reading import RunRecord


@finding("warning", "Rows wait for your word")
def rows_apart(run: RunRecord) -> str | None:
    """Rows of a kind that no expert knows, and that nobody trains on until the operator has decided."""
    last: dict[str, list[PlacedBucket]] = {}  # whenever a client's buckets are placed, all that wait are among them
    for event in run.changes:
        placed = event["placed"]
        last |= {who: [b for b in placed if b["client"] == who] for who in {bucket["client"] for bucket in placed}}
    waiting: dict[str, dict[str, int]] = {}  # what they wait for -> client -> rows
    for who, placed in sorted(last.items()):
        for bucket in placed:
            keys = bucket.get("waits", "living.notice=open")
            if bucket["expert"] < 0 and keys:  # others wait for more rows of their kind
                rows = waiting.setdefault(keys, {})
                rows[who] = rows.get(who, 0) + bucket["rows"]
    if not waiting:
        return None
    done = run.completed
    more = f" training.rounds={done + max(2, done // 2)}" if done >= run.config.training.rounds else ""
    listed = "; ".join(
        f"{sum(rows.values())} rows of {', '.join(rows)}: `{run.resume} {keys}{more}` opens an expert for them"
        for keys, rows in waiting.items()
    )
    return f"They are like none before, and nobody trains on them so far. {listed}."


@finding("note", "An expert that nobody feeds")
def unfed_expert(run: RunRecord) -> str | None:
    """An expert whose last rows are gone, or whose sites are away."""
    unfed = [m for m, examples in enumerate(run.fed) if not examples] if run.changes else []
    if not unfed:
        return None
    return (
        f"Nobody has examples for expert {', '.join(map(str, unfed))} any more. It stays as it is, and "
        "its prompts go to it until another expert opens, which nobody can tell from them (docs/living.md). With "
        "living.retire=N such an expert closes after N rounds."
    )


@finding("good", "An expert opened in mid-run")
def opened_experts(run: RunRecord) -> str | None:
    """New kinds that were noticed."""
    found = [
        f"expert {m} before round {event['round']}, for {sum(b['rows'] for b in own)} rows of "
        f"{', '.join(sorted({b['client'] for b in own}))}"
        for event in run.changes
        for m in event["opened"]
        if (own := [bucket for bucket in event["placed"] if bucket["expert"] == m])
    ]
    return f"A kind came that no expert knew: {'; '.join(found)}." if found else None
