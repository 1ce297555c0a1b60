"""A diagnosis in words: one verdict per question, then the tables that they rest on."""

import textwrap
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from fedweave.analysis.diagnosis import Diagnosis, Level, Number, Verdict, sources
from fedweave.console import table

_CONFLICT = {
    "fresh_adapter": "one fresh adapter for all",
    "merged_experts": "the experts merged into one",
    "experts": "the run's own experts",
    "router": "the router",
}
_STARVING = 0.25  # of an even share of the steps

Judgement = tuple[Level, str]


def verdicts(found: Diagnosis) -> list[Verdict]:
    """What the figures mean, section by section."""
    judged: list[Verdict] = []
    for name, section in SECTIONS.items():
        if name in found:
            level, text = section.judge(found)
            judged.append({"about": name, "level": level, "text": text})
        elif name in found["refused"]:
            judged.append({"about": name, "level": "note", "text": f"{name} {found['refused'][name]}"})
    return judged


def render(found: Diagnosis) -> str:
    """The whole diagnosis as text."""
    sample = found["sample"]
    parts = [
        f"{found['method']} · round {found['round']} of {found['rounds']} · {found['experts']} experts\n"
        f"Gradients and losses: a sample of {len(sample['clients'])} of {sample['of_clients']} clients, "
        f"{sample['batches']} × {sample['batch_size']} examples of each bucket. Router weights: all examples."
    ]
    for verdict in found["verdicts"]:
        mark = {"good": "✓", "note": "·", "warning": "!"}[verdict["level"]]
        parts.append(textwrap.fill(f"{mark} {verdict['text']}", 112, initial_indent="  ", subsequent_indent="    "))
    tables = [
        SECTIONS[verdict["about"]].table(found) for verdict in found["verdicts"] if found.get(verdict["about"])
    ]
    return "\n\n".join(
        [*parts, "The figures, in the paper's symbols (docs/diagnostics.md explains each):", *tables]
    )


# -------------------------------------------------------------------------------------- verdicts


def _judge_conflict(found: Diagnosis) -> Judgement:
    parts = found["conflict"]
    shared = parts.get("merged_experts", parts["fresh_adapter"])
    broken = [name for name, part in parts.items() if not part["bound_holds"]]
    if broken:
        return "warning", f"The bound of pure buckets fails for {', '.join(broken)}, which must not happen."
    client, bucket = shared["client_cancelled"], shared["bucket_cancelled"]
    if client < 0.01:
        return "note", (
            "No two patterns pull one shared adapter apart here: separate experts buy room, not less conflict."
        )
    return "good" if bucket < client / 2 else "note", (
        f"In one shared adapter, kinds of prompts that pull against each other cancel {_percent(client)} of a "
        f"client's squared gradient, but {_percent(bucket)} inside a bucket; no bucket exceeds its purity bound."
    )


def _judge_contamination(found: Diagnosis) -> Judgement:
    part = found["contamination"]
    now = part["rounds"][str(found["round"])]
    if not all(row["lemma_holds"] for row in part["rounds"].values()):
        return "warning", "The decomposition of contamination fails, which must not happen."
    count = f"{found['experts']} experts for {len(found['patterns'])} patterns"
    prefix = "" if part["clean"] else f"{count}: each is judged by its own target. "
    alive = [(chi, m) for m, chi in enumerate(now["chi"]) if chi is not None]
    if not alive:
        return "warning", "No expert receives any routed weight."
    chi, worst = max(alive, key=lambda one: one[0])
    causes = sources(now)
    cause = max(causes, key=lambda name: causes[name][worst] or 0.0)
    whole = [x for x in part["client_mixture"] if x is not None]
    mixture = f"; averaged over whole clients they would be up to {_percent(max(whole))}" if whole else ""
    level: Level = "good" if chi < 0.1 else "note" if chi < 0.3 else "warning"
    why = f", mostly from {cause}" if chi >= 0.01 else ""
    at_most = "below 0.1 %" if chi < 0.001 else f"at most {_percent(chi)}"
    where = f"expert {worst}, {part['target'][worst]}{why}"
    said = f"Of what an expert learns from, kinds other than its own are {at_most} ({where}){mixture}."
    return level, prefix + said


def _judge_budget(found: Diagnosis) -> Judgement:
    weight = found["effective_budget"]["mean_weight"]
    even = 1 / len(weight)
    starving = [m for m, w in enumerate(weight) if w < _STARVING * even]
    if starving:
        names = ", ".join(f"expert {m} ({weight[m]:.3f})" for m in starving)
        return "warning", (
            f"Starving: {names} with less than a quarter of an even share of routed weight ({even:.2f}); its loss "
            "cannot have converged, however pure its updates. Fewer experts or more rounds would help."
        )
    least = f"every mean routed weight is at least {min(weight):.2f} (even share {even:.2f})"
    return "good", f"No expert starves: {least}."


def _judge_paths(found: Diagnosis) -> Judgement:
    part = found["router_paths"]
    if not part["clients"]:
        return "note", "Every sampled client has one bucket, so there is nothing to interleave or to reset."
    rows = part["clients"].values()
    if not all(abs(r["first_step_ratio"] - 1) < 1e-3 and r["consensus_bound_holds"] for r in rows):
        return "warning", (
            "The first-step identity or the consensus bound fails, which must not happen; gradients may be below "
            "float precision."
        )
    persistent = fmean(r["loss_persistent"] - r["loss_start"] for r in rows)
    reset = fmean(r["loss_reset"] - r["loss_start"] for r in rows)
    fast = max(r["rate"] * r["smoothness"] for r in rows)
    limit = "" if fast <= 1 else f" The rate is {fast:.1f} times the largest that the theorem allows."
    if max(abs(persistent), abs(reset)) < 1e-4:
        return "note", (
            f"The router is settled: {part['steps']} more steps change its loss by less than 0.0001, whether "
            f"buckets take turns or each trains alone and the results are averaged.{limit}"
        )
    if abs(persistent - reset) < 0.01 * max(abs(persistent), abs(reset)):
        outcome = "they are level"
    else:
        outcome = "interleaved is ahead" if persistent < reset else "reset is ahead"
    return "good" if outcome == "interleaved is ahead" else "note", (
        f"{part['steps']} more router steps at rate {part['rate']:g} change the loss by {persistent:+.4f} where "
        f"buckets take turns (interleaved) and by {reset:+.4f} where each trains alone and the results are "
        f"averaged (reset): {outcome}.{limit}"
    )


def _judge_risk(found: Diagnosis) -> Judgement:
    part = found["routing_risk"]
    risks = [row["sparse"] for row in part["clients"].values() if "sparse" in row]
    if not all(risk["chain_holds"] for risk in risks):
        return "warning", "The chain of sparse-risk bounds fails, which must not happen."
    excess = sum(r["excess"] * r["examples"] for r in risks) / sum(r["examples"] for r in risks)
    loose = sum(not risk["calibrated"] for risk in risks)
    note = (
        f" In {loose} of {len(risks)} clients the oracle expert is not the best: no calibration there."
        if loose
        else ""
    )
    level: Level = "good" if part["margin_risk"] < 0.05 else "note" if part["margin_risk"] < 0.2 else "warning"
    return level, (
        f"The router misses the expert of a prompt's kind with {_percent(part['deficit'])} of its weight and "
        f"{_percent(part['margin_risk'])} of its choices; one active expert costs {excess:+.4f} of loss against "
        f"the oracle's choice.{note}"
    )


# -------------------------------------------------------------------------------------- tables


def _conflict_table(found: Diagnosis) -> str:
    rows = []
    for name, part in found["conflict"].items():
        pairs = [
            (cosine, f"{found['patterns'][k]}/{found['patterns'][l]}")
            for k, row in enumerate(part["cosines"])
            for l, cosine in enumerate(row[:k])
        ]
        cosine, pair = min(pairs)
        gammas = [row["gamma"] for row in part["clients"].values()]
        buckets = [row["gamma"] for rows in part["buckets"].values() for row in rows]
        rows.append([
            _CONFLICT[name], f"{max(gammas):.1e}", f"{max(buckets):.1e}", _percent(part["client_cancelled"]),
            _percent(part["bucket_cancelled"]), f"{pair} {cosine:+.2f}",
        ])  # fmt: skip
    header = ["gradient conflict", "max Γ, client", "bucket", "cancelled, client", "bucket", "most opposed, cosine"]
    return table(header, rows)


def _contamination_table(found: Diagnosis) -> str:
    part = found["contamination"]
    now = part["rounds"][str(found["round"])]
    header = [
        "contamination",
        "target",
        "χ",
        "≤ local",
        "+ misaligned",
        "+ leaked",
        "whole uploads",
        "whole clients",
    ]
    columns = [now["chi"], *sources(now).values(), now["client"], part["client_mixture"]]
    rows = [
        [f"expert {m}", target, *(_percent(column[m]) for column in columns)]
        for m, target in enumerate(part["target"])
    ]
    return table(header, rows)


def _budget_table(found: Diagnosis) -> str:
    part = found["effective_budget"]
    rows = [
        [f"expert {m}", f"{a:.2e}", f"{w:.3f}", *(f"{by[m]:.3f}" for by in part["weight_by_round"].values())]
        for m, (a, w) in enumerate(zip(part["budget"], part["mean_weight"], strict=True))
    ]
    return table(["effective budget", "A", "mean ρ", *(f"ρ after {t}" for t in part["weight_by_round"])], rows)


def _paths_table(found: Diagnosis) -> str:
    header = ["router paths", "ζ²", "D₁/η²ζ²", "D last", "Σ‖q‖²", "‖mean q‖²", "Σ‖e‖²", "L seen", "loss",
              "interleaved", "reset"]  # fmt: skip
    rows = [
        [
            name, f"{r['heterogeneity']:.1e}", f"{r['first_step_ratio']:.4f}", f"{r['dispersion'][-1]:.1e}",
            f"{sum(r['order_bias']):.1e}", f"{r['net_order_bias']:.1e}", f"{sum(r['consensus_error']):.1e}",
            f"{r['smoothness']:.2g}", f"{r['loss_start']:.4f}", f"{r['loss_persistent'] - r['loss_start']:+.4f}",
            f"{r['loss_reset'] - r['loss_start']:+.4f}",
        ]
        for name, r in found["router_paths"]["clients"].items()
    ]  # fmt: skip
    return table(header, rows) if rows else "  router paths"


def _risk_table(found: Diagnosis) -> str:
    rows = []
    for name, row in found["routing_risk"]["clients"].items():
        s = row.get("sparse")
        bound = ("–" if s["bound"] is None else f"{s['bound']:.4f}") if s else ""
        measured = (
            [f"{s['oracle']:.3f}", f"{s['excess']:+.4f}", f"{s['margin_bound']:.4f}", bound] if s else [""] * 4
        )
        rows.append([name, _percent(row["deficit"]), _percent(row["margin_risk"]), *measured])
    header = ["routing risk", "S", "R₀", "oracle loss", "sparse excess", "≤ Δmax·R₀", "≤ 2Δmax/c·(R−R†+β)"]
    return table(header, rows)


class _Section(NamedTuple):
    title: str
    judge: Callable[[Diagnosis], Judgement]
    table: Callable[[Diagnosis], str]


SECTIONS = {
    "conflict": _Section("Gradient conflict", _judge_conflict, _conflict_table),
    "contamination": _Section("Contamination", _judge_contamination, _contamination_table),
    "effective_budget": _Section("Effective budget", _judge_budget, _budget_table),
    "router_paths": _Section("Router paths", _judge_paths, _paths_table),
    "routing_risk": _Section("Routing risk", _judge_risk, _risk_table),
}


def _percent(share: Number) -> str:
    return "–" if share is None else "0 %" if share == 0 else "<0.1 %" if share < 0.001 else f"{100 * share:.1f} %"
