"""What a run's figures say in plain words. Each finding is one pure function of a run's record: it fires or not.

A finding names what was seen, why it matters and what to try. Thresholds are judgement, and stand beside the code
that uses them so that they can be argued with. Those on what changed in mid-run are in
:mod:`fedweave.report.findings_living`.
"""

import math
from collections import Counter

from fedweave.report import findings_living  # noqa: F401 - its findings enlist themselves
from fedweave.report.enlist import FINDINGS, Finding, by_level, finding
from fedweave.runs.reading import RunRecord
from fedweave.runs.text import DECIDED, strange_tasks


@finding("warning", "A starving expert")
def starving_expert(run: RunRecord) -> str | None:
    """An expert with less than a quarter of an even share of the examples learns little."""
    totals = run.fed
    fair = sum(totals) / max(1, len(totals))
    # one that has lost its last rows is another matter, and told by itself
    starving = [m for m, total in enumerate(totals) if total < fair / 4 and (total or not run.changes)]
    if run.experts < 2 or not starving:
        return None
    listed = ", ".join(f"expert {m} ({totals[m]} of {sum(totals)} examples)" for m in starving)
    return (
        f"{listed}: less than a quarter of an even share. It gets few steps, so its answers may be poor. Fewer "
        "experts (alignment.max_experts), more rounds, or more data of that kind would help."
    )


@finding("warning", "An expert that is hardly used")
def unused_expert(run: RunRecord) -> str | None:
    """An expert that was trained but that the router hardly ever picks."""
    unused = [m for m, share in enumerate(run.expert_load) if share < 0.02]
    if len(run.expert_load) < 2 or not unused:
        return None
    return (
        f"The router sends fewer than 2 % of validation prompts to expert {', '.join(map(str, unused))}. Either "
        "the validation data lack that kind of prompt, or the router has not learned it: try router.warm_start "
        "or more rounds."
    )


@finding("warning", "Low purity")
def low_purity(run: RunRecord) -> str | None:
    """Experts that mix tasks; needs labels, which only the audit has."""
    audit = run.audit
    if not audit or audit["global"]["purity"] >= 0.8:
        return None
    local, whole = audit["local"]["purity"], audit["global"]["purity"]
    where = (
        "Buckets are already mixed within clients: try discovery.features or another discovery.clusterer."
        if local < 0.8
        else "Buckets are pure within clients, so it is alignment that mixes them: try more discovery.warmup_steps."
    )
    return f"Experts mix tasks: purity {local:.2f} within clients, {whole:.2f} overall. {where}"


@finding("warning", "A client that pulls against the others")
def client_that_hurts(run: RunRecord) -> str | None:
    """A client whose updates point away from what all others do to the same experts."""
    against = {name: c for name, c in run.agreement.items() if c < -0.05}
    if not against:
        return None
    listed = ", ".join(f"{name} ({c:+.2f})" for name, c in sorted(against.items(), key=lambda item: item[1]))
    return (
        f"Mean cosine of its updates with everyone else's, on the same experts, is negative: {listed}. Look for "
        "wrong labels, another language or another answer format in its data, or leave it out and compare."
    )


@finding("warning", "Clients were left out")
def in_quarantine(run: RunRecord) -> str | None:
    """Clients, or their buckets of an expert, that pulled against the others for too long."""
    away = [f"{who} (round {event['round']})" for event in run.rounds for who in event.get("quarantined", [])]
    if not away:
        return None
    return (
        f"In quarantine since they pulled against the others: {', '.join(away)}. Look at their data; resume "
        "with federation.quarantine=0 to take them back."
    )


@finding("warning", "Clients counted nothing")
def left_out(run: RunRecord) -> str | None:
    """Clients that the rule left out, and for how long."""
    rounds = Counter(who for event in run.rounds for who in event.get("left_out", []))
    if not rounds:
        return None
    listed = ", ".join(f"{who} ({count} of {len(run.rounds)} rounds)" for who, count in rounds.most_common())
    return (
        f"They have pulled against the others, and the average went on without them: {listed}. Look at their data; "
        "if they are honest and merely different, federation.rule=clip leaves nobody out."
    )


@finding("warning", "Answers were refused")
def refused_answers(run: RunRecord) -> str | None:
    """Clients whose answers the server did not use."""
    refused = [item for event in run.rounds for item in event["refused"]]
    if not refused:
        return None
    names = list(dict.fromkeys(item["client"] for item in refused))
    return (
        f"{len(refused)} answers of {', '.join(names)} were not used; the last one because "
        f"{refused[-1]['reason']}. Every reason is in metrics.jsonl."
    )


@finding("warning", "M was chosen at the edge of its range")
def experts_at_the_edge(run: RunRecord) -> str | None:
    """M* at the upper end of the candidates: the true best may lie beyond."""
    if len(run.silhouettes) < 2 or run.aligned != max(run.silhouettes):
        return None
    return (
        f"The best silhouette is that of {run.aligned} experts, the most that were considered. Raise "
        "alignment.max_experts (or discovery.max_buckets, when there are too few buckets) and see whether M grows."
    )


@finding("note", "Many clients use all the buckets they may")
def buckets_at_the_edge(run: RunRecord) -> str | None:
    """Clients that used every bucket they were allowed."""
    most, clients = run.config.discovery.max_buckets, run.clients
    full = [name for name, client in clients.items() if len(client["buckets"]) >= most > 1]
    if len(full) * 3 < len(clients) or not full:
        return None
    return (
        f"{len(full)} of {len(clients)} clients split into {most} buckets, the largest allowed count. Raise "
        "discovery.max_buckets if their data may hold more kinds."
    )


@finding("warning", "Signatures hardly form groups")
def faint_alignment(run: RunRecord) -> str | None:
    """Signatures that barely form groups."""
    silhouettes = run.silhouettes
    if not silhouettes or max(silhouettes.values()) >= 0.1:
        return None
    return (
        f"The best silhouette is only {max(silhouettes.values()):.2f}, so M = {run.aligned} is close to a guess. "
        "More discovery.warmup_steps or a higher training.lr make signatures clearer; if they stay alike, the "
        "clients may have one kind of data, and one adapter (method=fedit) is simpler."
    )


@finding("warning", "Only one expert")
def one_expert(run: RunRecord) -> str | None:
    """FedWeave without specialisation."""
    if run.method != "fedweave" or run.discovery is None or max(run.experts, run.aligned) > 1:
        return None
    reason = run.discovery.get("alignment_note") or "alignment found no groups"
    return f"{reason}. With one expert FedWeave is plain federated averaging of one adapter."


@finding("warning", "The router is undecided")
def undecided_router(run: RunRecord) -> str | None:
    """Entropy near that of a coin toss: one active expert is then a gamble."""
    if run.entropy is None or run.entropy < 0.5:
        return None
    return (
        f"Its entropy is {run.entropy:.0%} of the largest possible. Sparse inference loses what the mixture knows: "
        "switch router.warm_start on, train longer, or answer with evaluation.routing=soft."
    )


@finding("warning", "Sparse inference costs accuracy")
def sparse_costs(run: RunRecord) -> str | Finding | None:
    """What one active expert costs against the whole mixture."""
    losses = run.best["loss"] if run.best else {}
    if not {"sparse", "soft"} <= set(losses) or run.experts < 2:
        return None
    sparse, soft = losses["sparse"]["macro"], losses["soft"]["macro"]
    extra = (sparse - soft) / max(soft, 1e-12)
    if extra <= 0.02:
        price = (
            f"one expert is {-extra:.1%} better"
            if extra <= -0.001
            else f"running one costs {extra:.1%} of loss"
            if extra >= 0.001
            else "running one costs nothing that shows"
        )
        return Finding(
            "good",
            "One active expert is enough",
            f"Sparse inference has loss {sparse:.3f}, the full mixture {soft:.3f}: {price}.",
        )
    return (
        f"One active expert has loss {sparse:.3f}, the full mixture {soft:.3f} ({extra:+.0%}). Use top-2 or soft "
        "routing, or a router that decides (router.warm_start)."
    )


@finding("warning", "Some tasks are worse than before training")
def worse_than_untouched(run: RunRecord) -> str | None:
    """A task that training made worse."""
    bare = run.untouched
    if bare is None or run.best is None:
        return None
    trained = run.best["loss"][run.best["used"]]
    worse = [task for task in trained if task != "macro" and trained[task] > bare[task]]
    if not worse:
        return None
    listed = ", ".join(f"{run.tasks.get(t, t)} ({bare[t]:.3f} → {trained[t]:.3f})" for t in worse)
    return f"Loss rose against the untouched model: {listed}. Check that data, or lower training.lr."


@finding("note", "The run went back to its best state")
def went_back(run: RunRecord) -> str | None:
    """The run noticed that it got no better (training.patience)."""
    if not run.setbacks:
        return None
    last = run.setbacks[-1]
    listed = ", ".join(
        f"after round {e['round']} to round {e['best_round']}" for e in run.setbacks if not e["ended"]
    )
    end = f" It ended early, after round {last['round']}." if last["ended"] else ""
    return (
        f"The validation loss did not fall for {run.config.training.patience} rounds. The run went back {listed}, "
        f"each time on at half of its rates, {last['pace']:g} of them by now.{end} A lower training.lr may do "
        "better."
    )


@finding("note", "Later rounds did harm")
def overfitting(run: RunRecord) -> str | None:
    """Validation loss well above its best by the end."""
    losses = [event["loss"] for event in run.comparable]
    if run.setbacks or len(losses) < 3 or losses[-1] < 1.02 * min(losses):
        return None
    best = run.comparable[losses.index(min(losses))]["round"]
    return (
        f"The validation loss was lowest after round {best} ({min(losses):.3f}) and ended at {losses[-1]:.3f}. "
        "The best round is what FedWeave serves; fewer rounds or a lower training.lr would save time."
    )


@finding("note", "It was still getting better")
def still_improving(run: RunRecord) -> str | None:
    """The last round was the best, and by more than a trifle."""
    losses = [event["loss"] for event in run.comparable]
    if run.state != "finished" or len(losses) < 3 or losses[-1] > min(losses):
        return None
    gain = (losses[-2] - losses[-1]) / max(losses[-2], 1e-12)
    if gain < 0.01:
        return None
    return (
        f"The last round lowered the validation loss by {gain:.0%}. Go on with `{run.resume} "
        f"training.rounds={run.completed + max(2, run.completed // 2)}`."
    )


@finding("note", "Tasks share an expert")
def experts_per_task(run: RunRecord) -> str | Finding | None:
    """Does every task have an expert of its own?"""
    everything = run.best["routing"] if run.best else {}
    strange = strange_tasks(everything)  # no expert answers these
    table = {task: row for task, row in everything.items() if task not in strange}
    if len(table) < 2 or run.experts < 2:
        return None
    dominant = {task: max(range(len(row)), key=row.__getitem__) for task, row in table.items()}
    if len(set(dominant.values())) == len(dominant):
        if strange:
            return None
        return Finding(
            "good",
            "Every task has its own expert",
            ", ".join(f"{run.tasks.get(t, t)} → expert {m}" for t, m in dominant.items())
            + ". No method saw these labels.",
        )
    shared = [m for m in set(dominant.values()) if list(dominant.values()).count(m) > 1]
    tasks = [run.tasks.get(t, t) for t, m in dominant.items() if m in shared]
    return (
        f"{', '.join(tasks)} are mostly answered by expert {', '.join(map(str, shared))}. That is right where "
        "they are alike, and a sign of mixed buckets where they are not."
    )


@finding("warning", "Tasks that no expert answers")
def without_expert(run: RunRecord) -> str | None:
    """Tasks most of whose prompts are strange to the router."""
    table = run.best["routing"] if run.best else {}
    listed = ", ".join(f"{run.tasks.get(t, t)} ({1 - sum(table[t]):.0%})" for t in strange_tasks(table))
    if not listed:
        return None
    return (
        f"The router takes most of their test prompts for like none that anybody trains on: {listed}. "
        "They get no expert: what all experts share answers them, or the bare model. That is right where the "
        "clients have no such rows (any more); where they have some, raise router.doubt or set router.familiar=1."
    )


@finding("note", "Kinds whose prompts go to several experts")
def scattered_kinds(run: RunRecord) -> str | None:
    """Kinds whose prompts go to several experts; needs labels, which only the audit has."""
    decided = run.best.get("decided", {}) if run.best else {}
    scattered = {kind: share for kind, share in decided.items() if share < DECIDED}
    if not scattered:
        return None
    listed = ", ".join(
        f"{run.tasks.get(kind, kind)} ({share:.0%})"
        for kind, share in sorted(scattered.items(), key=lambda item: item[1])[:5]
    )
    more = f" and {len(scattered) - 5} more" if len(scattered) > 5 else ""
    return (
        f"{len(scattered)} of {len(decided)} kinds have less than {DECIDED:.0%} of their prompts sent to one "
        f"expert: {listed}{more}. That is harmless where a shared part carries them (experts.shared_rank), and "
        "costs accuracy where experts know different things."
    )


@finding("note", "Small test set")
def small_test(run: RunRecord) -> str | None:
    """Few test examples: small differences mean nothing."""
    tested, tasks = len(run.manifest.get("test", [])), max(1, len(run.tasks))
    each = tested / tasks
    if not tested or each >= 100:
        return None
    return (
        f"About {each:.0f} test examples per task: scores carry an error of about ±{0.5 / math.sqrt(each):.2f}. "
        "Do not read much into differences below twice that."
    )


def findings(run: RunRecord) -> list[Finding]:
    """Everything that fires for a run."""
    return by_level([finding for check in FINDINGS if (finding := check(run)) is not None])
