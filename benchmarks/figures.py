"""What a benchmark found, as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def keep(found: Any, output: Path | None) -> None:
    """As JSON, where a file was asked for."""
    if output:
        output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
