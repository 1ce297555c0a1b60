"""What the site adds to the pages: navigation from README.md's tables, the reference of every config key, colours
of code for light and dark, and a search that also works from the disk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

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
    files.append(File.generated(config, "highlight.css", content=highlight()))
    return files


@event_priority(-100)  # after the search plugin, which writes the index
def on_post_build(config: Any) -> None:
    """The search index as a script: a page that was opened from the disk may read no JSON (docs/theme.js)."""
    folder = Path(config.site_dir) / "search"
    texts = json.loads((folder / "search_index.json").read_text(encoding="utf-8"))["docs"]
    (folder / "index.js").write_text(f"window.searchTexts = {json.dumps(texts)};", encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A link to a file outside docs/ works in the repository; on the site it becomes the file's name."""

    def name(link: re.Match) -> str:
        target = (Path(page.file.abs_src_path).parent / link.group(2)).resolve()
        inside = target.is_relative_to(Path(config.docs_dir).resolve())
        return (
            link.group(0) if inside else f"{link.group(1)} (`{target.relative_to(Path(config.docs_dir).parent)}`)"
        )

    return re.sub(r"\[([^]]+)\]\((\.\./[^)#\s]+)\)", name, markdown)


def highlight() -> str:
    """Pygments' colours, one style for light pages and one for dark."""
    light, dark = (HtmlFormatter(style=style) for style in ("default", "monokai"))
    return light.get_style_defs(".codehilite") + "\n" + dark.get_style_defs('[data-bs-theme="dark"] .codehilite')


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
