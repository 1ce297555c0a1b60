from typing import Any


def render(found: dict[str, Any]) -> str:
    return "\n".join(f"{k}: {v}" for k, v in found["refused"].items())
