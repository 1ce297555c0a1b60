"""The model card: what was trained, on what, how well, how private, and how to load it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedweave.alignment.kept import KeptSignatures
from fedweave.backbone.catalog import public_name
from fedweave.backbone.prompts import PromptFormat
from fedweave.config import Config
from fedweave.description.record import Experts, title
from fedweave.description.text import short
from fedweave.events import ValidationEvent
from fedweave.inference.model import FedWeaveModel
from fedweave.schema import Description, Summary

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank may be


@dataclass(frozen=True)
class Origin:
    """The run that a model comes from."""

    config: Config
    round: int
    clients: int
    summary: Summary | None  # None until the run has ended
    validation: ValidationEvent | None  # of that round, where one was measured
    base: str  # what others call the backbone
    kept: KeptSignatures | None = None  # where the run has any


def base_model(description: Description) -> str:
    """What others call a bundle's backbone; bundles of earlier versions do not say."""
    return description.get("base_model") or public_name(str(description["backbone"]["model"]))


_SPAN = [
    "Experts see a prompt's last token and the answer alone (`experts.span=answer`). PEFT, vLLM and other programs "
    "let them see the whole prompt, which they were not trained for: use `fedweave serve` or `fedweave.load`.",
    "",
]


_FALLBACK = {True: "what the experts share alone", False: "the bare backbone"}


def model_card(model: FedWeaveModel, origin: Origin, told: Experts | None = None, template: bool = True) -> str:
    config, layout, router = origin.config, model.mixture.layout, model.experts.router
    limited = router is not None and router.axes > 0
    strange = f"; one like none before is answered by {_FALLBACK[layout.shared > 0]}" if limited else ""
    shared = f", each with the shared adapter of rank {layout.shared} in it," if layout.shared else ""
    lines = [
        *_head(origin.base, "peft"),
        "# A FedWeave model",
        "",
        f"{layout.experts} LoRA experts of rank {layout.rank}{shared} on {origin.base}, trained by "
        f"federated learning (method `{config.method}`, {origin.clients} clients, round {origin.round}), and a "
        f"router that picks an expert for every prompt{strange}.",
        "",
        *(_SPAN if config.experts.span == "answer" else []),
        *(_experts(told) if told else []),
        *_data(origin),
        *_results(origin, model.backbone.note),
        *_privacy(config, origin.summary, limited),
        *how_a_prompt_looks(model.backbone.prompts, template),
        *_loading(origin.base, model, template),
    ]
    return "\n".join(lines)


def soft_card(description: Description, weights: Sequence[float], prompting: list[str]) -> str:
    model = base_model(description)
    mixture = ", ".join(f"{w:g} × expert {m}" for m, w in enumerate(weights))
    rank = description["rank"] * description["experts"] + description.get("shared", 0)
    lines = [
        *_head(model, "peft"),
        "# A fixed mixture of FedWeave experts",
        "",
        f"One LoRA adapter of rank {rank} on {model}: {mixture}.",
        "It has no router: every prompt gets this mixture.",
        "",
        *_peft(model, "PATH"),
        *prompting,
    ]
    return "\n".join(lines)


def merged_card(description: Description, expert: int, prompting: list[str]) -> str:
    model = base_model(description)
    lines = [
        *_head(model, "transformers"),
        f"# Expert {expert} of a FedWeave model",
        "",
        f"{model} with expert {expert} of {description['experts']} added into its weights. It has no router.",
        "",
        *prompting,
    ]
    return "\n".join(lines)


def prompt_example(prompts: PromptFormat) -> list[str]:
    """In words, and as an example."""
    said = (
        "by the tokenizer's chat template" if prompts.kind == "chat" else "as plain text, without a chat template"
    )
    return [
        "## How a prompt looks",
        "",
        f"Prompts were rendered {said} in training. The experts know this form and no other:",
        "",
        "```text",
        prompts.render("Fix the grammar: Ada go to school.")[0],
        "```",
        "",
    ]


def how_a_prompt_looks(prompts: PromptFormat, template: bool) -> list[str]:
    """The same, and in code."""
    lines = prompt_example(prompts)
    if not template:
        return [*lines, "Render it so yourself: no chat template gives this tokenizer's own tokens.", ""]
    return [
        *lines,
        "The tokenizer beside this card has a chat template that renders it so:",
        "",
        "```python",
        "from transformers import AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("PATH")',
        'chat = [{"role": "user", "content": "Fix the grammar: Ada go to school."}]',
        "inputs = tokenizer.apply_chat_template(",
        '    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True',
        ")",
        f"output = model.generate(**inputs, max_new_tokens=64, eos_token_id={prompts.end_id})",
        'answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()',
        "```",
        "",
    ]


def vllm_command(model: str, adapters: Sequence[str], rank: int, path: str = "PATH") -> str:
    """The command that serves all experts by name; the rank it is told must be one that vLLM allows."""
    allowed = next((r for r in _VLLM_RANKS if r >= rank), rank)
    modules, count = " ".join(f"{name}={path}/{name}" for name in adapters), len(adapters)
    return (
        f"vllm serve {model} --enable-lora --max-loras {count} --max-lora-rank {allowed} --lora-modules {modules}"
    )


def _head(model: str, library: str) -> list[str]:
    return [
        "---",
        f"library_name: {library}",
        f"base_model: {model}",
        "pipeline_tag: text-generation",
        "tags: [fedweave, federated-learning, moe-lora]",
        "---",
        "",
    ]


def _experts(told: Experts) -> list[str]:
    """What each expert is, as far as the exporter chose to tell."""
    lines = ["## Experts", "", f"By the router's choice for {told['source']}.", "",
             "| expert | share | words that set its prompts apart |", "|---|---|---|"]  # fmt: skip
    for m, expert in enumerate(told["experts"]):
        words = ", ".join(map(_plain, expert["words"])) or "–"
        lines.append(f"| {_plain(title(told, m))} | {expert['share']:.0%} | {words} |")
    lines.append("")
    for m, expert in enumerate(told["experts"]):
        if expert.get("typical"):
            lines += [f"{_plain(title(told, m))}, typical prompts:", ""]
            lines += [*(f"- {_plain(prompt)}" for prompt in expert["typical"]), ""]
    return lines


def _plain(text: str) -> str:
    """Somebody's words within Markdown, as words."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", short(text))


def _data(origin: Origin) -> list[str]:
    config, summary = origin.config, origin.summary
    sources = {
        "sample": "the built-in sample of four instruction patterns",
        "paper": "CoEdIT, GSM8K, TweetEval (sentiment) and ARC-Challenge",
        "tasks": "a benchmark's tasks",
        "jsonl": "the clients' own files",
        "sites": "each a site with data of its own, which never left it",
    }
    text = f"{origin.clients} clients, {sources[config.data.source]}"
    if summary:
        text += f"; {summary['examples']} training examples in {summary['buckets']} buckets"
    if config.data.source in ("sample", "paper"):
        text += f"; task mixtures drawn from a Dirichlet distribution with α = {config.data.alpha:g}"
    return ["## Data", "", f"{text}.", ""]


def _results(origin: Origin, note: str) -> list[str]:
    """Test figures and the routing table of a finished run, with the remarks that belong beside them."""
    summary, measured = origin.summary, origin.validation
    notes = summary["notes"] if summary else [note] if note else []
    remarks = [*(f"> {text}" for text in notes), ""] if notes or summary else []
    tested = [summary["test"].get("best"), summary["test"].get("last")] if summary else []
    best = next((one for one in tested if one and one.get("round") == origin.round), None)
    if summary is None or best is None:
        return [*(_sites(measured) if measured and "sites" in measured else []), *remarks]
    used, scores = best["used"], best.get("score", {})
    lines = ["## Test", "", f"| task | score | loss ({used}) |", "|---|---|---|"]
    losses = best["loss"][used]
    for task, loss in losses.items():
        if task == "macro" and len(losses) == 2:  # the mean of one task is that task
            continue
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
    return [*lines, "", *remarks]


def _sites(measured: ValidationEvent) -> list[str]:
    """What a federation knows whose server has no test set."""
    rows = [f"| {name} | {loss:.3f} |" for name, loss in measured["sites"].items()]
    intro = "The server has no test set. Each site measured the loss on examples that it kept back:"
    return ["## Validation", "", intro, "", "| site | loss |", "|---|---|", *rows,
            f"| all sites | {measured['loss']:.3f} |", ""]  # fmt: skip


def _privacy(config: Config, summary: Summary | None, limited: bool) -> list[str]:
    """``limited``: the router learned from the clients' features which prompts are strange."""
    private, masked = config.privacy, config.federation.secure_aggregation
    sent = "expert and router updates" + (", sums of prompt features and of their products" if limited else "")
    shared = f"{sent} and bucket signatures were shared"
    if masked:
        shared = f"bucket signatures were shared, and of {sent} totals alone (secure aggregation)"
    said = "No differential privacy was applied."
    if private.level != "none":
        found = summary.get("privacy") if summary else None
        spent = f", of which ε = {found['spent']:.2f} was spent" if found else ""
        whom = {"client": "client, with all that it has", "example": "single training example"}[private.level]
        said = (
            f"Noise was added at the clients for the differential privacy of every {whom}: at most ε = "
            f"{private.epsilon:g} at δ = {private.delta:g} over all steps together{spent}."
        )
    elif not masked:
        shared, said = f"{shared} in the clear", "No differential privacy and no secure aggregation were applied."
    return ["## Privacy", "", f"Prompts, features and labels stayed with their clients; {shared}. {said}", ""]


def _loading(base: str, model: FedWeaveModel, template: bool) -> list[str]:
    layout = model.mixture.layout
    return [
        "## Loading it",
        "",
        "With its router, in Python or as an OpenAI-compatible server (`fedweave serve PATH`):",
        "",
        "```python",
        "import fedweave",
        "",
        'model = fedweave.load("PATH")',
        'model.generate(["…"])',
        "```",
        "",
        *_peft(base, "PATH/expert_0"),
        "All experts in vLLM, chosen by name, or by the router with `fedweave serve PATH --upstream URL` in front:",
        "",
        "```bash",
        vllm_command(base, model.experts.adapter_names, layout.rank + layout.shared)
        + (" --chat-template PATH/chat_template.jinja" if template else ""),
        "```",
        "",
        "For llama.cpp, Ollama and MLX: `fedweave export PATH DIR --format gguf`, or `--format mlx`.",
        "",
    ]


def _peft(model: str, path: str) -> list[str]:
    return [
        "One adapter, with plain PEFT:",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{model}")',
        f'model = PeftModel.from_pretrained(base, "{path}")',
        "```",
        "",
    ]
