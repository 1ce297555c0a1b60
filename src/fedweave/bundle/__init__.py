"""A trained model as a folder that others can load: PEFT adapters, the router, a model card."""

from fedweave.bundle.export import export_run
from fedweave.bundle.load import is_bundle, load_bundle

__all__ = ["export_run", "is_bundle", "load_bundle"]
