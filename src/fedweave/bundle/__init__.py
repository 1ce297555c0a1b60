"""A trained model as a folder that others can load: PEFT adapters, the router, a model card."""

from fedweave.bundle.export import export_merged, export_run, export_soft
from fedweave.bundle.load import is_bundle, load_bundle

__all__ = ["export_merged", "export_run", "export_soft", "is_bundle", "load_bundle"]
