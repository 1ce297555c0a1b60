"""The small federations of the method tests serve here too."""

from tests.methods.conftest import config
from tests.runs.conftest import small

__all__ = ["config", "small"]
