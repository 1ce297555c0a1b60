"""The page: complete, self-contained, safe against odd names, and honest about what is missing."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser

import pytest
import yaml

from fedweave.cli import main
from fedweave.report.curves import method_losses
from fedweave.report.groups import Group, find_runs, group_runs, on_common_seeds
from tests.helpers import read_json, read_jsonl, write_jsonl
from tests.report.conftest import COMPARED

FIGURES = {
    "test-score", "test-loss", "loss-by-task", "training-loss", "mixture", "client-agreement", "router-entropy",
    "expert-load", "prompts-bucket", "prompts-expert", "prompts-task", "signatures", "silhouettes",
    "clients-experts", "routing-fedweave", "sparse-trade-off", "loss-for-bytes", "time", "round-times",
    "contamination", "effective-budget",
}  # fmt: skip


class Outline(HTMLParser):
    """Ids, sections, figures, and whatever a page would fetch."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: list[str] = []
        self.sections: list[str] = []
        self.fetches: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "section":
            self.sections.append(values["id"])
        for key in ("src", "href", "xlink:href"):
            if values.get(key) and not values[key].startswith(("#", "data:")):
                self.fetches.append(values[key])


def page_of(folder, *arguments):
    assert main(["report", str(folder), *arguments]) == 0
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def written(tiny_run, tmp_path_factory):
    """A finished and diagnosed run with its report."""
    folder = shutil.copytree(tiny_run(COMPARED), tmp_path_factory.mktemp("written") / "run")
    assert main(["diagnose", str(folder), "--quiet"]) == 0
    page_of(folder)
    return folder


def test_a_finished_run_gives_every_chapter_and_every_figure(written):
    text = (written / "report.html").read_text()
    outline = Outline(text)
    assert outline.sections == [
        "findings", "described", "worth", "results", "clients", "experts", "prompts", "routing", "inference",
        "theory", "costs", "setup",
    ]  # fmt: skip
    shown = {i.removeprefix("figure-") for i in outline.ids if i.startswith("figure-")}
    assert shown == FIGURES
    assert {p.stem for p in (written / "figures").glob("*.png")} == FIGURES
    assert {p.stem for p in (written / "figures").glob("*.svg")} == FIGURES
    summary = read_json(written / "summary.json")
    assert f"<b>{summary['test']['best']['score']['macro']:.3f}</b>" in text
    assert "http-equiv" not in text, "a finished run does not reload itself"


def test_the_page_is_one_file_with_unique_names(written):
    text = (written / "report.html").read_text()
    outline = Outline(text)
    assert outline.fetches == [] and outline.tags.count("script") == 1 and "link" not in outline.tags
    assert not re.search(r"@import|url\((?!#|data:)", text)
    assert len(outline.ids) == len(set(outline.ids))
    referred = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    assert referred <= set(outline.ids)


def test_figures_follow_the_theme(written):
    text = (written / "report.html").read_text()
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--ink)" in drawings and "var(--c0)" in drawings
    assert not re.findall(r"#(?:1f2328|656d76|d8dee4|0072b2|d55e00)\b", drawings), "a fixed colour is left"
    saved = (written / "figures" / "mixture.svg").read_text()
    assert "var(" not in saved and "#0072b2" in saved


def test_a_federation_of_sites_has_a_page(finished):
    """What a server without data or a test set records: no tasks, no labels, no features, losses by site."""
    (finished / "embedding.json").unlink()
    config = yaml.safe_load((finished / "config.yaml").read_text())
    config |= {"engine": "flower", "data": {"source": "sites"}}
    (finished / "config.yaml").write_text(yaml.safe_dump(config))
    lines = read_jsonl(finished / "metrics.jsonl")
    for line in lines:
        if line["event"] == "validation":
            for key in ("tasks", "expert_load", "expert_weight"):
                del line[key]
            line |= {"sites": {"north": line["loss"], "south": line["loss"] + 1}, "router_entropy": None}
    write_jsonl(finished / "metrics.jsonl", lines)
    (finished / "manifest.json").write_text(json.dumps({"source": "sites", "seed": 42, "federation": "abc"}))
    summary = read_json(finished / "summary.json")
    summary |= {"test": {}, "tasks": {}, "audit": None, "train_tokens": None}
    (finished / "summary.json").write_text(json.dumps(summary))
    discovery = read_json(finished / "discovery.json")
    del discovery["bucket_tasks"], discovery["audit"]
    (finished / "discovery.json").write_text(json.dumps(discovery))
    text = page_of(finished)
    assert 'id="figure-loss-by-site"' in text and 'id="figure-signatures"' in text
    assert "the sites keep it to themselves" in text and "federation.test" in text
    assert f"<td>{lines[-1]['sites']['south']:.3f}</td>" in text, "what there is instead of a test"
    assert main(["watch", str(finished)]) == 0


def test_a_run_under_way_refreshes_itself_and_a_bare_one_still_gives_a_page(finished):
    for name in ("summary.json", "discovery.json", "embedding.json"):
        (finished / name).unlink()
    (finished / "metrics.jsonl").write_text('{"event": "validation", "rou')  # half a line
    progress = read_json(finished / "progress.json")
    (finished / "progress.json").write_text(json.dumps({**progress, "state": "running"}))
    text = page_of(finished)
    assert 'http-equiv="refresh"' in text and ">running<" in text
    assert "the run has not finished" in text and "discovery has not finished" in text


def test_odd_client_names_stay_text(finished):
    for name in ("discovery.json", "metrics.jsonl", "manifest.json", "embedding.json"):
        file = finished / name
        text = re.sub(r'"checksum": "\w+",', "", file.read_text())
        file.write_text(text.replace("client_0", "<script>alert(1)</script> $x_0$ & co"))
    text = page_of(finished)
    assert Outline(text).tags.count("script") == 1 and "&lt;script&gt;" in text  # the page has one of its own


def test_a_comparison_becomes_groups_with_seed_bands_and_a_trend(grid):
    groups = group_runs(find_runs([grid]))
    assert [(g.label, [r.seed for r in g.runs]) for g in groups] == [("α = 0.1", [1, 2]), ("α = 0.5", [1, 2])]
    text = page_of(grid)
    assert 'id="figure-heterogeneity-loss"' in text and 'id="figure-loss-by-method"' in text
    assert "2.500 ± 0.707" in text, "mean and sample deviation over the two seeds"


def test_a_seed_without_other_routings_and_a_run_without_a_test_have_their_place(grid, tmp_path):
    """One seed found a single expert, so nothing was softly routed; or a server had no test set."""
    first, second = (grid / "cells" / f"alpha-0.1-seed-{seed}" for seed in (1, 2))
    summary = json.loads((second / "summary.json").read_text())
    soft = summary["test"]["best"]["loss"].pop("soft")
    (second / "summary.json").write_text(json.dumps(summary))
    page = tmp_path / "both.html"
    assert main(["report", str(first), str(second), "--output", str(page)]) == 0
    assert "2.500 ± 0.707" in page.read_text() and f"<td>{soft['macro']:.3f}</td>" in page.read_text()
    (first / "summary.json").write_text(json.dumps({**summary, "test": {}}))
    other = grid / "cells" / "alpha-0.5-seed-1"
    assert main(["report", str(first), str(other), "--output", str(page)]) == 0
    assert "the server has no test set" in page.read_text()


def test_an_untrained_start_does_not_press_the_curves_flat(record):
    """A method without warmup adapters starts at the bare backbone's loss, far above every trained round."""

    def run(*losses):
        return record(events=[{"event": "validation", "round": t, "tasks": {"macro": x}} for t, x in losses])

    low = Group("low", [run((0, 3.0), (1, 0.8), (2, 0.7))])
    high = Group("high", [run((0, 1.0), (1, 0.9), (2, 0.8))])
    picture = method_losses([low, high])
    bottom, top = picture.figure.axes[0].get_ylim()
    assert 0.6 < bottom < 0.7 and 0.9 < top < 1.0 and "at up to 3.00, beyond the frame" in picture.caption
    near = method_losses([high, Group("near", [run((0, 1.0), (1, 0.8))])])
    assert near.figure.axes[0].get_ylim()[1] >= 1.0 and "beyond" not in near.caption


def test_a_trend_over_an_unfinished_grid_uses_the_seeds_that_all_points_have(grid):
    groups = group_runs(find_runs([grid]))
    groups[1].runs.pop()
    assert [[r.seed for r in g.runs] for g in on_common_seeds(groups)] == [[1], [1]]
    groups[1].runs.clear()
    assert [len(g.runs) for g in on_common_seeds(groups)] == [2, 0], "nothing in common: as they are"


def test_runs_of_one_adapter_have_a_page_too(tiny_copy):
    text = page_of(tiny_copy("method=fedit", "training.rounds=1"))
    assert "fedit does not discover buckets" in text and "has one adapter" in text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere"], "neither a run folder"),
        (["broken/config.yaml"], "neither a run folder"),
        (["RUN", "--output", "page.pdf"], "must end in .html"),
        (["RUN", "RUN2"], "--output"),
        (["RUN2"], "damaged"),
    ],
)
def test_mistakes_are_one_sentence(finished, tmp_path, monkeypatch, complains, arguments, word):
    monkeypatch.chdir(tmp_path)
    broken = shutil.copytree(finished, tmp_path / "broken")
    (broken / "discovery.json").write_text("{")
    names = {"RUN": str(finished), "RUN2": str(broken)}
    assert word in complains("report", *[names.get(a, a) for a in arguments])


def test_without_matplotlib_the_extra_is_named(finished, monkeypatch, complains):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "fedweave[report]" in complains("report", finished)
