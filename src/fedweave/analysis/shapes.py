"""A model's shape from its configuration alone: which linear layers it has and how many parameters. No weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedweave.backbone.announced import in_gguf, skeleton
from fedweave.backbone.catalog import on_hub
from fedweave.backbone.decoder import FAMILIES
from fedweave.backbone.quantised import predicted_bytes
from fedweave.backbone.targets import linear_layers
from fedweave.errors import UserError, first_line
from fedweave.experts.layout import AdapterLayout
from fedweave.training.memory import StepMemory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# The paper's two backbones (gated on the hub) and the default model, so that costs need neither hub nor files.
BUILT_IN: dict[str, dict[str, int | str]] = {
    "meta-llama/Llama-3.2-3B": {
        "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 128256,
    },
    "google/gemma-2-2b": {
        "model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
    },
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """What costs depend on."""

    name: str
    model: PreTrainedModel  # on the meta device: modules with shapes and no numbers
    config: PretrainedConfig  # of its text side

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def layout(self, targets: tuple[str, ...], rank: int, experts: int, shared: int = 0) -> AdapterLayout:
        return AdapterLayout.of(linear_layers(self.model, targets, self.name), rank, experts, shared)

    def memory(self, layout: AdapterLayout, element_size: int) -> StepMemory:
        """The count of a step's memory with experts of this layout."""
        fused = self.config.model_type in FAMILIES
        return StepMemory(self.config, fused, element_size, layout.names, layout.rows)

    def backbone_bytes(self, weights: str, memory: StepMemory, cpu: bool = False) -> float:
        """The frozen weights, kept as ``backbone.weights`` says."""
        gguf = Path(self.name) if self.name.endswith(".gguf") else None
        kept = float(predicted_bytes(self.model, weights, memory.element, gguf, groups=cpu))
        return kept if weights == "dense" else kept + memory.unpacked(weights == "stored", cpu)


def model_shape(name: str, revision: str | None = None) -> ModelShape:
    """The shape of a built-in name, a folder, a .gguf file or a hub id (of which only config.json is fetched)."""
    config = _config(name, revision)
    return ModelShape(name, skeleton(config, name), config.get_text_config())


def _config(name: str, revision: str | None) -> PretrainedConfig:
    from transformers import AutoConfig

    path = Path(name).expanduser()
    if name in BUILT_IN and revision is None and not path.is_dir():
        settings = dict(BUILT_IN[name])
        return AutoConfig.for_model(settings.pop("model_type"), tie_word_embeddings=True, **settings)
    if path.suffix == ".gguf" and not path.is_file():
        raise UserError(f"{name}: there is no such GGUF file.")
    if path.suffix != ".gguf" and not path.is_dir() and not on_hub(name):  # the hub would be asked for a minute
        raise UserError(
            f"{name} is no run, recipe, model folder or .gguf file, and no hub id of the form owner/name; built in "
            f"are {', '.join(BUILT_IN)}."
        )
    try:
        if path.suffix == ".gguf":
            in_gguf(path)  # nothing in it is larger than the file
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        where = path if path.is_dir() else name
        return AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise UserError(
            f"{name} is no run, recipe, model folder or .gguf file, and as a hub id it gives no configuration "
            f"({first_line(error)}); built in are {', '.join(BUILT_IN)}."
        ) from None
