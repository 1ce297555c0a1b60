"""The chapters of the page: which pictures, tables and remarks stand together, and what is missing from each."""

from collections.abc import Sequence

import numpy as np
import yaml

from fedweave.analysis import worth
from fedweave.analysis.diagnosis import Diagnosis
from fedweave.analysis.ledger import spent_table
from fedweave.analysis.spent import run_costs
from fedweave.analysis.verdicts import SECTIONS, render
from fedweave.console import duration, table
from fedweave.errors import UserError
from fedweave.json_files import read_json
from fedweave.report import curves, maps, theory, tradeoffs
from fedweave.report.enlist import Finding, by_level
from fedweave.report.experts import what_experts_are
from fedweave.report.findings import findings
from fedweave.report.groups import Group
from fedweave.report.parts import Section, Table
from fedweave.report.timeline import life
from fedweave.report.worth import was_it_worth_it
from fedweave.runs.reading import RunRecord
from fedweave.runs.text import AUDIT, FEW_TASKS, audit_rows, privacy_text, rows_of
from fedweave.schema import ClientFigures, Tested

_AT_HOME = "the sites keep it to themselves."


def lead_run(groups: Sequence[Group]) -> RunRecord:
    """The run that is shown in detail: FedWeave's first, else the first."""
    ours = [g for g in groups if g.first.method == "fedweave"]
    return (ours or list(groups))[0].first


def all_sections(groups: Sequence[Group]) -> list[Section]:
    lead = lead_run(groups)
    own = next(group for group in groups if lead in group.runs)
    made = [
        _findings(groups, lead),
        what_experts_are(lead),
        was_it_worth_it(lead),
        _results(groups, own, lead),
        _data(lead),
        _discovery(lead),
        life(lead),
        _prompts(lead),
        _routing(groups, lead),
        _inference(groups, lead),
        Section("heterogeneity", "Heterogeneity").show(*tradeoffs.heterogeneity(groups)),
        _theory(lead),
        _costs(groups, lead),
        _what_was_run(groups, lead),
    ]
    return [section for section in made if not section.empty]


def _findings(groups: Sequence[Group], lead: RunRecord) -> Section:
    section = Section("findings", "Findings", findings=findings(lead))
    if sum(len(g.runs) for g in groups) > 1:
        section.intro = f"About {lead.path}, which stands for the rest wherever one run is shown."
    seeds = max(len(g.runs) for g in groups)
    if seeds == 1:
        text = (
            "Repeat with other seeds before you trust a small difference: `fedweave compare RECIPE seed=42,43,44`."
        )
        section.findings = by_level([*section.findings, Finding("note", "One seed", text)])
    return section


def _results(groups: Sequence[Group], own: Group, lead: RunRecord) -> Section:
    section = Section("results", "Scores and losses")
    section.show(
        curves.test_scores(groups), curves.test_change(lead), curves.method_losses(groups), curves.task_losses(own),
        curves.site_losses(lead), curves.task_scores(own), curves.training_loss(lead),
    )  # fmt: skip
    finished = [g for g in groups if g.finished()]
    if lead.best and len(finished) == 1:
        section.tables.append(_task_table(finished[0], lead.best, lead))
        if lead.unseen:
            section.tables.append(_task_table(finished[0], lead.unseen, lead, unseen=True))
    elif finished:
        section.tables += [_group_table(finished, kind) for kind in ("score", "loss")]
        if any(g.test("loss", "macro", unseen=True) for g in finished):
            section.tables += [_group_table(finished, kind, unseen=True) for kind in ("score", "loss")]
    section.lacks(not lead.summary, "test results: the run has not finished.")
    if lead.summary and lead.best is None:
        section.tables += _site_table(lead)
        section.missing.append("test results: the server has no test set; name one in federation.test.")
    section.lacks(
        not lead.elsewhere and bool(lead.validations) and not any("scores" in e for e in lead.validations),
        "scores by round: generation takes long, so they are measured with evaluation.score_rounds=true only.",
    )
    return section


def _task_table(group: Group, tested: Tested, lead: RunRecord, unseen: bool = False) -> Table:
    """One experiment: a row per task of the test set, or of the unseen tasks."""
    bare = lead.untouched_unseen if unseen else lead.untouched
    scored, used = "score" in tested, tested["used"]
    others = [routing for routing in tested["loss"] if routing != used]
    titles = {**(lead.manifest.get("unseen_tasks", {}) if unseen else lead.tasks), "macro": "macro average"}
    rows = []
    for task in rows_of(tested["loss"][used]):
        figures = [_figure(group.test(kind, task, unseen)) for kind in (["score"] if scored else []) + ["loss"]]
        row = [titles.get(task, task), *figures]
        for routing in others:  # a seed that found one expert has no other routing
            each = [run.unseen if unseen else run.best for run in group.runs]
            losses = [one["loss"].get(routing) for one in each if one]
            row.append(_figure([by_task[task] for by_task in losses if by_task]))
        rows.append([*row, *([f"{bare[task]:.3f}"] if bare else [])])
    header = [
        "unseen tasks" if unseen else "test set",
        *([f"score, {used} ↑"] if scored else []),
        *(f"loss, {x} ↓" for x in [used, *others]),
    ]
    return Table([*header, *(["loss, untouched"] if bare else [])], rows)


def _site_table(lead: RunRecord) -> list[Table]:
    """Without a test set: what the sites measured on their own rows."""
    if (chosen := lead.best_validation) is None:
        return []
    losses = {**chosen.get("sites", {}), "all sites": chosen["loss"]}
    header = [f"validation, round {chosen['round']}", "loss ↓"]
    return [Table(header, [[name, f"{loss:.3f}"] for name, loss in losses.items()])]


def _group_table(groups: Sequence[Group], kind: str, unseen: bool = False) -> Table:
    """Several experiments: a row for each, the best macro figure in bold."""
    own = {} if unseen or len(groups[0].first.tasks) > FEW_TASKS else groups[0].first.tasks
    tasks = {"macro": "macro", **own}
    rows = [
        [g.label, str(len(g.finished())), *(_figure(g.test(kind, task, unseen)) for task in tasks)] for g in groups
    ]  # fmt: skip
    means = np.array([float(np.mean(g.test(kind, "macro", unseen) or [np.nan])) for g in groups])
    best = None if np.isnan(means).all() else int(np.nanargmax(means) if kind == "score" else np.nanargmin(means))
    what = f"{'unseen tasks,' if unseen else 'test'} {kind} {'↑' if kind == 'score' else '↓'}"
    return Table([what, "seeds", *tasks.values()], rows, best)


def _figure(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = f"{np.mean(values):.3f}"
    return f"{mean} ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else mean


def _data(lead: RunRecord) -> Section:
    section = Section("clients", "Clients and their data").show(
        maps.mixture(lead), maps.feeding(lead), curves.client_agreement(lead)
    )
    if lead.best and (each := lead.best.get("clients")) and not (lead.path / worth.FILE).is_file():
        section.tables.append(_client_table(each))
    section.lacks(not lead.mixture and lead.elsewhere, f"the mixture of tasks: {_AT_HOME}")
    section.lacks(
        len(lead.tasks) < 2 and not lead.elsewhere, "the mixture of tasks: the rows carry no task labels."
    )
    return section


def _client_table(each: dict[str, ClientFigures]) -> Table:
    """The test as every client sees it."""
    scored = all("score" in figures for figures in each.values())
    header = ["test, by client", *(["score ↑"] if scored else []), "loss ↓"]
    rows = [
        [name, *([f"{figures['score']:.3f}"] if "score" in figures else []), f"{figures['loss']:.3f}"]
        for name, figures in each.items()
    ]
    return Table(header, rows)


def _discovery(lead: RunRecord) -> Section:
    section = Section(
        "experts",
        "From buckets to experts",
        "Every client clusters its own prompts into buckets, warms up one small adapter per bucket and sends its "
        "B factors, the signature. The server merges buckets with near signatures into experts. No label is used.",
    )
    section.show(maps.signatures(lead), maps.silhouettes(lead))
    if lead.audit:
        section.tables.append(Table(["audit against labels", *AUDIT], audit_rows(lead.audit, lead.kind_audit)))
    if lead.discovery is None:
        section.missing.append("discovery has not finished yet.")
    elif not lead.discovery.get("signature_distance"):
        section.intro = ""
        section.missing.append(f"signatures: {lead.method} does not discover buckets.")
    return section


def _prompts(lead: RunRecord) -> Section:
    section = Section("prompts", "A map of the prompts", small=True).show(*maps.embeddings(lead))
    section.lacks(lead.discovery is not None and lead.elsewhere, f"the map of prompts: {_AT_HOME}")
    return section


def _routing(groups: Sequence[Group], lead: RunRecord) -> Section:
    section = Section("routing", "Routing")
    one_each = list({group.first.method: group for group in reversed(groups)}.values())[::-1]
    section.show(*[maps.routing(group) for group in one_each])
    section.show(curves.router_entropy(groups), curves.expert_load(lead))
    if lead.best and (decided := lead.best.get("decided")):
        rows = [[lead.tasks.get(kind, kind), f"{share:.1%}"] for kind, share in decided.items()]
        section.tables.append(Table(["kind", "of its prompts to its most frequent expert"], rows))
    routed = lead.experts > 1
    section.lacks(len(groups) > len(one_each), "routing of other experiments with the same methods.")
    section.lacks(routed and lead.elsewhere, f"expert load over rounds: {_AT_HOME}")
    section.lacks(not routed and lead.discovery is not None, f"routing: {lead.method} has one adapter here.")
    return section


def _inference(groups: Sequence[Group], lead: RunRecord) -> Section:
    section = Section("inference", "Sparse, top-2 or soft").show(tradeoffs.routing_trade_off(groups))
    section.lacks(
        lead.experts > 1 and lead.summary is not None and not section.pictures,
        "score against latency: run with evaluation.compare_routings=true (or fedweave compare sparse-inference).",
    )
    return section


def _theory(lead: RunRecord) -> Section:
    section = Section("theory", "The theory at work")
    again = f"`fedweave diagnose {lead.path}` writes it again"
    found = read_json(lead.path / "diagnostics.json", Diagnosis, again)
    if found is None:
        section.lacks(
            lead.experts > 1 and not lead.elsewhere,
            f"the paper's theory on this run: measure it with fedweave diagnose {lead.path}.",
        )
        section.lacks(lead.experts > 1 and lead.elsewhere, f"the paper's theory on this run: {_AT_HOME}")
        return section
    section.findings = [Finding(v["level"], SECTIONS[v["about"]].title, v["text"]) for v in found["verdicts"]]
    section.show(theory.contamination(found, lead.tasks), theory.effective_budget(found))
    section.folded.append({"title": "all figures of the diagnosis", "text": render(found)})
    return section


def _costs(groups: Sequence[Group], lead: RunRecord) -> Section:
    section = Section("costs", "Communication and time")
    try:
        section.tables.append(Table(*spent_table(run_costs(lead).spent)))
    except UserError as error:
        section.missing.append(f"costs: {error}")
    section.show(tradeoffs.loss_for_bytes(groups), tradeoffs.time_spent(lead), tradeoffs.round_times(lead))
    return section


def _what_was_run(groups: Sequence[Group], lead: RunRecord) -> Section:
    section = Section("setup", "What was run")
    rows = [
        [group.label, run.method, str(run.seed), f"{run.completed}/{run.config.training.rounds}", run.state,
         str(run.path)]
        for group in groups for run in group.runs
    ]  # fmt: skip
    header = ["experiment", "method", "seed", "rounds", "state", "folder"]
    if len(rows) > 8:
        section.folded.append({"title": f"all {len(rows)} runs", "text": table(header, rows)})
    else:
        section.tables.append(Table(header, rows))
    if lead.summary and "privacy" in lead.summary:
        section.intro = f"{privacy_text(lead.summary['privacy']).capitalize()}."
    config = (lead.path / "config.yaml").read_text(encoding="utf-8")
    section.folded.append({"title": f"config.yaml of {lead.path}", "text": config})
    if lead.summary:
        environment = yaml.safe_dump(lead.summary["environment"], sort_keys=False)
        section.folded.append({"title": "versions, device and commit", "text": environment})
        if lead.summary["notes"]:
            section.folded.append({"title": "notes", "text": "\n".join(lead.summary["notes"])})
    return section


# -------------------------------------------------------------------------------------- the first screen


def cards(groups: Sequence[Group]) -> list[dict[str, str]]:
    """The few figures that everybody looks for."""
    lead = lead_run(groups)
    best, audit, clients = lead.best, lead.audit, lead.clients
    shown: dict[str, str] = {}
    if best:
        macro, bare = "macro" if len(lead.tasks) > 1 else next(iter(lead.tasks), "macro"), lead.untouched
        if "score" in best:
            shown["test score" if macro != "macro" else "macro score"] = f"{best['score'][macro]:.3f}"
        shown[f"test loss, {best['used']}"] = f"{best['loss'][best['used']][macro]:.3f}"
        if bare:
            shown["loss of the untouched model"] = f"{bare[macro]:.3f}"
    elif lead.validations:
        shown["validation loss"] = f"{lead.validations[-1]['loss']:.3f}"
    if clients:
        shown["buckets → experts"] = f"{sum(len(c['buckets']) for c in clients.values())} → {lead.aligned}"
    if lead.experts != lead.aligned and clients:
        shown["experts by now"] = str(lead.experts)
    if audit:
        shown["global purity"] = f"{audit['global']['purity']:.2f}"
    shown["rounds"] = f"{lead.completed} of {lead.config.training.rounds}"
    shown["clients"] = str(len(clients or lead.manifest.get("clients", {})))
    if spent := [event["epsilon"] for event in lead.rounds if "epsilon" in event]:
        shown["privacy spent"] = f"ε {spent[-1]:.2f}"
    if lead.summary:
        shown["time"] = duration(lead.summary["timing"]["total_s"])
    return [{"label": label, "value": value} for label, value in shown.items()]
