"""Flower and Ray without their outbound connections: no telemetry, no update check, no package index."""

import logging
import os

OUTBOUND_OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
}


def hush() -> None:
    """Flower's own lines below a warning; what an operator needs is said by fedweave."""
    for name in ("flwr", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)


def quiet_environment(**extra: str) -> dict[str, str]:
    """This process's environment with every switch off, for a child; a switch set by the user stays as it is."""
    return {**OUTBOUND_OFF, **os.environ, **extra}
