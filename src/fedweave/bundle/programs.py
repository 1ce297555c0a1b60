"""A model for other programs: GGUF files for llama.cpp and Ollama, adapters for MLX.

DIR/base-Q8_0.gguf             the bare backbone, with the template of training
    expert_0.gguf              an expert, and what it shares with the others, as a LoRA file
    expert_0.Modelfile         both, for Ollama
    …
    README.md                  the commands that use them

With --merge K instead: one GGUF file that has expert K in its weights.
"""

from pathlib import Path

from fedweave.bundle.card import base_model, prompt_example
from fedweave.bundle.export import merge, named_adapters, new_folder
from fedweave.bundle.gguf_model import QUANTISATIONS, write_lora, write_model
from fedweave.bundle.mlx import write_mlx_adapter
from fedweave.bundle.ollama import modelfile, read_between
from fedweave.bundle.tokens import write_tokenizer
from fedweave.errors import UserError
from fedweave.inference.model import FedWeaveModel
from fedweave.schema import Description

_LONGEST = 8192  # tokens of context that nobody has to ask for


def check_quantisation(name: str) -> str:
    if name not in QUANTISATIONS:
        raise UserError(f"--quantise {name}: there are {', '.join(QUANTISATIONS)}.")
    return name


def write_gguf(
    target: Path, model: FedWeaveModel, description: Description, quantisation: str, expert: int | None = None
) -> None:
    """The backbone and every adapter, or one model with an expert in its weights."""
    backbone, base = model.backbone, base_model(description)
    longest = min(backbone.longest or _LONGEST, _LONGEST)
    with new_folder(target) as partial:
        modelfiles: dict[str, str | None] = {}  # of each, the adapter beside it
        if expert is not None:
            merge(model, expert)
            file, name = f"expert_{expert}-{quantisation}.gguf", f"{base} with expert {expert} of a FedWeave model"
            modelfiles[f"expert_{expert}.Modelfile"] = None
        else:
            file, name = f"base-{quantisation}.gguf", base
            for adapter, tensors in named_adapters(model):
                write_lora(partial / f"{adapter}.gguf", tensors, description, backbone)
                modelfiles[f"{adapter}.Modelfile"] = f"{adapter}.gguf"
        write_model(partial / file, backbone, quantisation, name)
        for path, beside in modelfiles.items():
            text = modelfile(file, beside, backbone.prompts, longest)
            (partial / path).write_text(text, encoding="utf-8")
        adapters = [beside for beside in modelfiles.values() if beside]
        card = _gguf_card(model, description, file, adapters, list(modelfiles))
        (partial / "README.md").write_text(card, encoding="utf-8")


def write_mlx(target: Path, model: FedWeaveModel, description: Description) -> None:
    """Every adapter as a folder that mlx_lm loads, and the tokenizer with the template of training."""
    with new_folder(target) as partial:
        for name, tensors in named_adapters(model):
            write_mlx_adapter(partial / name, tensors, description)
        template = write_tokenizer(partial, model.backbone.prompts)
        (partial / "README.md").write_text(_mlx_card(model, description, template), encoding="utf-8")


def llama_server_command(file: str, adapters: list[str]) -> str:
    """Every adapter loaded and none applied: each request names its own."""
    loras = f" --lora {','.join(adapters)} --lora-init-without-apply" if adapters else ""
    return f"llama-server -m {file}{loras}"


def _gguf_card(
    model: FedWeaveModel, description: Description, file: str, adapters: list[str], modelfiles: list[str]
) -> str:
    what = (
        "A LoRA file for each expert, and their backbone," if adapters else "One model, an expert in its weights,"
    )
    prompts = model.backbone.prompts
    lines = [
        f"# {base_model(description)} with FedWeave experts, for llama.cpp and Ollama",
        "",
        f"{what} in llama.cpp's format.",
        "",
        "```bash",
        llama_server_command(file, adapters),
        *(
            ["fedweave serve BUNDLE --upstream http://127.0.0.1:8080 --upstream-kind llama   # picks the expert"]
            if adapters
            else []
        ),
        *(f"ollama create {Path(name).stem.replace('_', '-')} -f {name}" for name in modelfiles),
        "```",
        "",
        *prompt_example(prompts),
    ]
    if read_between(prompts) is None:
        lines += ["Ollama's template language cannot write it so: the Modelfiles hand prompts on as they are.", ""]
    return "\n".join(lines)


def _mlx_card(model: FedWeaveModel, description: Description, template: bool) -> str:
    prompts = model.backbone.prompts
    rendered = "tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)"
    lines = [
        f"# {base_model(description)} with FedWeave experts, for MLX",
        "",
        *prompt_example(prompts),
        *([] if template else ["Render it so yourself: no chat template gives this tokenizer's own tokens.", ""]),
        "## Loading it",
        "",
        "```python",
        "from mlx_lm import generate, load",
        "from transformers import AutoTokenizer",
        "",
        f'model, _ = load("{base_model(description)}", adapter_path="PATH/expert_0")',
        'tokenizer = AutoTokenizer.from_pretrained("PATH")  # with the template of training',
        'chat = [{"role": "user", "content": "Fix the grammar: Ada go to school."}]',
        f"answer = generate(model, tokenizer, {rendered})",
        "```",
        "",
    ]
    return "\n".join(lines)
