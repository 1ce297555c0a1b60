"""Costs as text: the tables of ``fedweave budget``."""

from fedweave.analysis.budget import Budget, Card, Discovery, Memory
from fedweave.analysis.spent import Spent
from fedweave.console import table


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def parameter_table(budgets: list[Budget]) -> str:
    """The paper's Table 5: rank, experts, router copies and trainable parameters, one column per model."""
    models = [budget.model.split("/")[-1] for budget in budgets]
    header = ["trainable parameters (M)", "rank", "experts", "router copies", *models]
    rows = []
    for name, payload in budgets[0].methods.items():
        counts = [f"{budget.methods[name].trainable / 1e6:.2f}" for budget in budgets]
        rows.append([name, str(payload.rank), str(payload.experts), str(payload.routers or "–"), *counts])
    return table(header, rows)


def traffic_table(budget: Budget) -> str:
    header = [
        f"bytes of one client, updates in {budget.precision}",
        "sends a round",
        "receives a round",
        f"{budget.rounds} rounds",
    ]
    rows = []
    for name in budget.methods:
        up, down = budget.round_bytes(name)
        rows.append([name, size(up), size(down), size((up + down) * budget.rounds)])
    return table(header, rows)


def discovery_lines(once: Discovery) -> str:
    lines = [
        f"once, for a client with {once.buckets:.3g} buckets:",
        f"  signatures   {once.signature_numbers:,} numbers, {size(once.signature_bytes)} a bucket, "
        f"{size(once.client_bytes)} in all",
        f"  adapters     {size(once.adapter_bytes)} a bucket (A and B, from which the experts start; the paper "
        "counts B alone)",
        f"  warmup       {round(once.warmup_steps, 1):g} steps beside {once.training_steps} of training: "
        f"{once.warmup_ratio:.1%}",
    ]
    if once.warm_start_bytes:
        lines.append(f"  warm start   {size(once.warm_start_bytes)} of router states")
    if once.familiar_bytes:
        lines.append(f"  familiar     {size(once.familiar_bytes)} of sums of features and of their products")
    return "\n".join(lines)


def memory_tables(memory: Memory) -> str:
    """Peak memory of a GPU by part, and how many clients at a time go into usual cards."""
    title = f"GPU memory, {memory.clients} clients × {memory.examples} examples of {memory.tokens:g} tokens"
    parts = [[name, size(memory.kept[name]), size(memory.again[name])] for name in memory.kept]
    parts.append(["at the peak", size(sum(memory.kept.values())), size(sum(memory.again.values()))])

    def cell(card: Card, way: str) -> str:
        count = getattr(card, way)
        shown = "–" if not count else "all" if count == memory.clients else str(count)
        return f"{shown} ←" if card.chosen == way else shown

    ways = {"kept": "all kept", "again": "layers run twice"}
    header = ["clients at a time in", *(f"{card.gib} GiB" for card in memory.cards)]
    rows = [[title, *(cell(card, way) for card in memory.cards)] for way, title in ways.items()]
    fits = table(header, rows)
    return f"{table([title, *ways.values()], parts)}\n\n{fits}\n  ← what clients_per_step and checkpointing choose"


def spent_table(spent: list[Spent]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of what, predicted, measured, remark."""

    def show(value: float | None, unit: str) -> str:
        if value is None:
            return "–"
        if unit == "bytes":
            return size(value)
        if unit == "ratio":
            return f"{value:.1%}"
        if unit == "seconds":
            return f"{value:.1f} s"
        return f"{value / 1e9:.1f} GFLOP/s" if unit == "FLOP/s" else f"{value:,.0f}"

    rows = [[row.what, show(row.predicted, row.unit), show(row.measured, row.unit), row.note] for row in spent]
    return ["this run", "predicted", "measured", ""], rows
