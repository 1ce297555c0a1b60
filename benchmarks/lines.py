"""Whose lines stand in src/ today: those up to a commit, and of every commit since, by ``git blame``.

    python -m benchmarks.lines a52f2d8                       # where the house was redesigned (docs/decisions.md)
    python -m benchmarks.lines a52f2d8 --count "types|Smaller|one place"

``--count`` adds up the commits since whose first line matches. Lines that a later commit merely moved within their
file stay with whom they came from.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.splitlines()


def blamed(path: str) -> list[str]:
    """The commit of every line."""
    return [
        line.split()[0].lstrip("^") for line in git("blame", "-w", "-M", "-l", "-s", "--root", "HEAD", "--", path)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("since")
    parser.add_argument("--count", default="")
    arguments = parser.parse_args()
    subjects = dict(line.split(" ", 1) for line in git("log", "--format=%H %s", f"{arguments.since}..HEAD"))
    owners = Counter(commit for path in git("ls-files", "src/*.py") for commit in blamed(path))
    later = Counter({subjects[commit]: n for commit, n in owners.items() if commit in subjects})
    for subject, n in later.most_common():
        print(f"{n:6}  {subject}")
    print(f"\n{owners.total()} lines, {owners.total() - later.total()} of them as of {arguments.since}")
    if arguments.count:
        chosen = [n for subject, n in later.items() if re.search(arguments.count, subject)]
        print(f"{sum(chosen)} more of {len(chosen)} commits whose first line matches {arguments.count!r}")


if __name__ == "__main__":
    main()
