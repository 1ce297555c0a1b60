"""What the site adds to the pages: navigation from README.md's tables and the reference of every config key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from fedweave.config import Config
from fedweave.settings import describe

REFERENCE = "config-keys.md"


def on_config(config: Any) -> Any:
    """README.md names every page once, in reading order; a page that it forgets fails the strict build."""
    nav: list[dict[str, Any]] = [{"Home": "README.md"}]
    for line in (Path(config.docs_dir) / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            nav.append({line[3:]: []})
        elif found := re.match(r"\| \[[^]]+\]\(([^)]+\.md)\)", line):
            section = nav[-1]
            next(iter(section.values())).append(found.group(1))
    nav.append({"Every config key": REFERENCE})
    config.nav = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, REFERENCE, content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A link to a file outside docs/ works in the repository; on the site it becomes the file's name."""

    def name(link: re.Match) -> str:
        target = (Path(page.file.abs_src_path).parent / link.group(2)).resolve()
        inside = target.is_relative_to(Path(config.docs_dir).resolve())
        return (
            link.group(0) if inside else f"{link.group(1)} (`{target.relative_to(Path(config.docs_dir).parent)}`)"
        )

    return re.sub(r"\[([^]]+)\]\((\.\./[^)#\s]+)\)", name, markdown)


def reference() -> str:
    """The source of `fedweave config` as a page, one table per section."""
    lines = [
        "# Every config key",
        "",
        "Set them in a recipe or on the command line, as in `training.rounds=5`.",
        "",
    ]
    section = None
    for key, default, doc in describe(Config):
        name = key.rpartition(".")[0]
        if name != section:
            section = name
            lines += ["", f"## {name or 'the run'}", "", "| key | default | meaning |", "|---|---|---|"]
        lines.append(f"| `{key}` | `{default}` | {doc.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"
