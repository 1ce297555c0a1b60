"""Hypothesis as tests use it: the same examples every time, and no clock, for it says how busy a machine is."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

settings.register_profile("fedweave", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedweave")

__all__ = ["given", "settings", "st"]
