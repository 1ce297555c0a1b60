"""How many lines of src/ say what the software could do before the house was redesigned, counted in two ways
(docs/decisions.md, "How long it is").

    python -m benchmarks.lines            # both
    python -m benchmarks.lines --list     # and whose lines stand in src/ today, and what each commit changed

Blamed: lines that stand since then, and those that ``git blame`` gives to commits of the redesign's kind. It is too
kind: a line that a new capability rewrote counts as its own. Added up: the lines that there were when the new
seam stood and nothing new was merged, and what commits of the kind have added and taken away since. It is too
strict: it has the redesign's types and mended defects, and lines that a new capability has replaced.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter

BEFORE = "a52f2d8"  # the last commit before the redesign
SEAM = "456c90b"  # the new seam, and nothing new
# First lines of commits that name a seam, types, names or a smaller way to say the same.
KIND = re.compile(
    "One door|One form|One-caller|Types of|Kernels|Methods:|A site with its|Files and folders|Writers and|Smaller|"
    "fedweave.load|Backbone, kernels|Inference, serving, budget|k-means|Engines:|What is summed|Diagnose says|"
    "A zero|runs: the types|Serving: one error|Settings|Export, evaluate|Seeds|Weight decay|Merge: types|Names:|"
    "Architecture|Tables:|Fewer hand|Losses of|Docstrings|Annotations|Flower: trust said once|"
    "runs/folder: one flattening|compare: an unused name|What of a backbone's settings"
)


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.splitlines()


def subjects(since: str, *options: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in git("log", *options, "--format=%H %s", f"{since}..HEAD"))


def blamed() -> tuple[Counter[str], int]:
    """(today's lines by the first line of their commit, for commits since BEFORE; all lines)"""
    named, later, total = subjects(BEFORE), Counter[str](), 0
    for path in git("ls-files", "src/*.py"):
        for line in git("blame", "-w", "-M", "-l", "-s", "--root", "HEAD", "--", path):
            commit = line.split()[0].lstrip("^")
            later[named.get(commit, "")] += 1
            total += 1
    return later, total


def changed() -> dict[str, int]:
    """By how many lines of src/ each commit of the kind since SEAM made it longer."""
    found = {}
    for commit, subject in subjects(SEAM, "--no-merges").items():
        if KIND.match(subject):
            figures = [line.split("\t") for line in git("show", "--numstat", "--format=", commit, "--", "src/*.py")]
            found[f"{commit[:7]} {subject}"] = sum(int(more) - int(less) for more, less, _ in figures)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    listed = parser.parse_args().list
    later, total = blamed()
    kind = sum(lines for subject, lines in later.items() if KIND.match(subject))
    commits = changed()
    if listed:
        for subject, lines in [*later.most_common(), *sorted(commits.items(), key=lambda one: one[1])]:
            print(f"{lines:6}  {subject or f'(up to {BEFORE})'}")
    files = [path for path in git("ls-tree", "-r", "--name-only", SEAM, "src") if path.endswith(".py")]
    seam = sum(len(git("show", f"{SEAM}:{path}")) for path in files)
    print(f"{total} lines in src/ today")
    print(f"blamed: {later['']} from up to {BEFORE} and {kind} of the redesign's kind, {later[''] + kind} in all")
    smaller = sum(lines for subject, lines in commits.items() if " Smaller:" in subject)
    print(
        f"added up: {seam} at {SEAM}, {sum(commits.values()):+} since, {seam + sum(commits.values())} in all",
        end="",
    )
    print(f" ({smaller:+} by {sum(' Smaller:' in subject for subject in commits)} commits that do nothing else)")


if __name__ == "__main__":
    main()
