"""The documentation is under test: every command runs, every link leads somewhere, the site builds.

Every fenced bash block of README.md and docs/ is executed, page by page, in a folder that holds what the pages
speak of: a finished run in runs/quickstart, clients in my_clients/ and cases.csv, rows in mine.jsonl.
FEDWEAVE_OVERRIDES replaces the real model by a tiny one with little data; the commands are the pages' own. A block
that cannot run here says why in the line before it:

    <!-- not run: needs a GPU -->
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedweave.cli import main
from tests.helpers import ROOT, blocks, command, write_jsonl

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(body: str) -> list[str]:
    """Whole command lines: continuations joined, comments and empty lines gone."""
    lines = body.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def furnished(tmp_path_factory, tiny_run, small):
    """(folder, overrides): everything that the pages take for granted."""
    place, fewer = tmp_path_factory.mktemp("docs"), "training.rounds=2"
    shutil.copytree(tiny_run(fewer, "evaluation.compare_routings=true"), place / "runs" / "quickstart")
    rows = [{"prompt": f"Add {i} and {i + 1}.", "response": str(2 * i + 1)} for i in range(12)]
    (place / "my_clients").mkdir()
    cases = [f"Which ward has number {i}?,Ward {i},{'north' if i % 2 else 'south'}" for i in range(24)]
    (place / "cases.csv").write_text("\n".join(["question,answer,hospital", *cases]))
    for file in ("my_clients/hospital_a", "my_clients/hospital_b", "mine", "held_out"):
        write_jsonl(place / f"{file}.jsonl", rows)
    program = place / ".venv" / "bin" / "fedweave"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    program.chmod(0o755)
    return place, [*small, fewer]


def run_line(line: str, place: Path) -> None:
    """One command. A plain `fedweave …` runs in this process, which saves its start; anything else in bash."""
    words = shlex.split(line, comments=True)
    plain = words[0] in ("fedweave", ".venv/bin/fedweave") and not re.search(r"[|<>;&$`]", line.split(" #")[0])
    if plain:
        assert main(words[1:]) == 0, line
        return
    path = f"{place / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-ec", line], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


RUNNABLE = [page for page in PAGES if any(not b["reason"] for b in blocks(page, "bash"))]


@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_commands_run(page, furnished, tmp_path, monkeypatch):
    place, overrides = furnished
    folder = shutil.copytree(place, tmp_path / "place")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDWEAVE_OVERRIDES", shlex.join(overrides))
    for block in blocks(page, "bash"):
        if not block["reason"]:
            for line in commands(block["body"]):
                run_line(line, folder)


def test_blocks_that_are_not_run_say_why(capsys):
    """Listed, so that nobody has to guess what is untested."""
    left_out = [(name(page), b["reason"], b["body"]) for page in PAGES for b in blocks(page, "bash") if b["reason"]]
    for page, reason, body in left_out:
        print(f"not run in {page} ({reason}): {commands(body)[0]}")
    assert all(len(reason) > 10 for _, reason, _ in left_out)
    everything = sum(len(blocks(page, "bash")) for page in PAGES)
    assert len(left_out) < everything / 2, "most of the documentation must be executable"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_are_python_and_links_lead_somewhere(page):
    for block in blocks(page, "python"):
        ast.parse(block["body"])
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}, which is not there"


def test_every_verb_is_in_the_readme():
    from fedweave.cli import _parser

    verbs = next(a for a in _parser()._actions if a.metavar == "VERB").choices
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [verb for verb in verbs if f"fedweave {verb}" not in readme] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'fedweave[docs]'")
    place = tmp_path_factory.mktemp("docs") / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_the_site_explains_every_key_and_loads_nothing_from_elsewhere(site):
    from fedweave.config import Config
    from fedweave.settings import describe

    reference = (site / "config-keys.html").read_text(encoding="utf-8")
    assert [key for key, _, _ in describe(Config) if f"<code>{key}</code>" not in reference] == []
    assert '<div class="highlight">' in (site / "quickstart.html").read_text(encoding="utf-8")
    fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', reference)
    assert fetched == [], "the site must work without a network"


def test_the_site_opened_from_the_disk_finds_words(site, browser):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "index.html").as_uri())
    field = browser.find_element("css selector", "input.md-search__input")
    browser.execute_script("document.querySelector('[data-md-toggle=search]').click()")
    field.send_keys("silhouette")

    def results() -> list[str]:
        return [link.get_attribute("href") for link in browser.find_elements("css selector", ".md-search-result a")]

    WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda _: results())
    assert any("config-keys.html" in link for link in results())


def test_overrides_of_the_machine_stand_below_what_is_typed(monkeypatch, capsys):
    monkeypatch.setenv("FEDWEAVE_OVERRIDES", "training.rounds=7 seed=5")
    assert main(["config", "quickstart", "seed=6"]) == 0
    shown = capsys.readouterr().out
    assert "rounds: 7" in shown and "seed: 6" in shown
