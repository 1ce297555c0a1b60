"""Features on disk are those of this very model."""

import json
import shutil

import torch

from fedweave.backbone.features import cached_features, compute_features
from fedweave.backbone.load import load_backbone
from fedweave.config import BackboneConfig


def test_a_model_of_another_config_has_features_of_its_own(model_folder, tmp_path):
    """Its weights, and with them its fingerprint, may be the same."""
    folder = shutil.copytree(model_folder("mistral"), tmp_path / "mistral")
    config, found = json.loads((folder / "config.json").read_text()), []
    for window in (8, None):
        (folder / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
        backbone = load_backbone(BackboneConfig(model=str(folder), device="cpu", max_length=128))
        prompts = backbone.prompts.encode_prompts(["How many hats has Mia, who has three and finds four more?"])
        found.append(cached_features(backbone, prompts))
        assert torch.equal(found[-1], cached_features(backbone, prompts))
        assert torch.equal(found[-1], compute_features(backbone, prompts))
    assert not torch.equal(*found)
