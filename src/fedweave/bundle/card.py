"""The model card: what was trained, on what, how well, and how to load it."""

from __future__ import annotations

from typing import Any

from fedweave.config import Config
from fedweave.inference.model import FedWeaveModel


def model_card(config: Config, model: FedWeaveModel, facts: dict[str, Any], summary: dict[str, Any] | None) -> str:
    layout = model.mixture.layout
    lines = [
        "---",
        "library_name: peft",
        f"base_model: {config.backbone.model}",
        "pipeline_tag: text-generation",
        "tags: [fedweave, federated-learning, moe-lora]",
        "---",
        "",
        "# A FedWeave model",
        "",
        f"{layout.experts} LoRA experts of rank {layout.rank} on {config.backbone.model}, trained by federated "
        f"learning (method `{config.method}`, {facts['clients']} clients, round {facts['round']}), and a router "
        "that picks an expert for every prompt.",
        "",
        *_results(summary, model.backbone.note),
        "## Privacy",
        "",
        "Prompts, features and labels stayed with their clients; expert and router updates and bucket signatures "
        "were shared in the clear. No differential privacy and no secure aggregation were applied.",
        "",
        "## Loading it",
        "",
        "With its router:",
        "",
        "```python",
        "from fedweave import FedWeaveModel",
        "",
        'model = FedWeaveModel.from_pretrained("PATH")',
        'model.generate(["…"])',
        "```",
        "",
        "One expert, with plain PEFT:",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{config.backbone.model}")',
        'model = PeftModel.from_pretrained(base, "PATH/expert_0")',
        "```",
        "",
        "All experts in vLLM, chosen by name:",
        "",
        "```bash",
        f"vllm serve {config.backbone.model} --enable-lora --max-loras {layout.experts} "
        f"--max-lora-rank {layout.rank} --lora-modules "
        + " ".join(f"expert_{m}=PATH/expert_{m}" for m in range(layout.experts)),
        "```",
        "",
    ]
    return "\n".join(lines)


def _results(summary: dict[str, Any] | None, note: str) -> list[str]:
    """Test figures and the routing table of a finished run, with the remarks that belong beside them."""
    if summary is None:
        return [f"> {note}", ""] if note else []
    best = summary["test"]["best"]
    used, scores = best["used"], best.get("score", {})
    lines = ["## Test", "", f"| task | score | loss ({used}) |", "|---|---|---|"]
    for task, loss in best["loss"][used].items():
        score = f"{scores[task]:.3f}" if task in scores else "–"
        lines.append(f"| {summary['tasks'].get(task, 'macro average')} | {score} | {loss:.3f} |")
    experts = range(summary["experts"])
    lines += [
        "",
        "| router weights | " + " | ".join(f"expert {m}" for m in experts) + " |",
        "|---|" + "---|" * len(experts),
    ]
    lines += [
        f"| {summary['tasks'][task]} | " + " | ".join(f"{w:.2f}" for w in row) + " |"
        for task, row in best["routing"].items()
    ]
    return [*lines, "", *(f"> {note}" for note in summary["notes"]), ""]
