"""Write a model for others: a bundle, one dense model, or one adapter for a fixed mixture.

DIR/README.md                  model card
    experts.json               what each expert is, where that was asked for
    tokenizer.json, chat_template.jinja …      the tokenizer, with a template that renders prompts as training did
    fedweave.json              what the router needs to know, and a checksum of every file but the card
    router.safetensors
    signatures.safetensors     of the experts' buckets, where the run has kept them (docs/living.md)
    expert_0/adapter_config.json, adapter_model.safetensors      loads with plain PEFT and vLLM; the tokenizer, too
    expert_1/…

Whatever is written is loaded back through PEFT and compared with the trained experts before it gets its name.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file

from fedweave.backbone.catalog import public_name, remember
from fedweave.backbone.quantised import unpack
from fedweave.backbone.targets import spelled_out
from fedweave.bundle.adapter import check_adapter, compare, probe, write_adapter
from fedweave.bundle.card import Origin, how_a_prompt_looks, merged_card, model_card, soft_card
from fedweave.bundle.tokens import write_tokenizer
from fedweave.description.record import Experts, write_experts
from fedweave.errors import UserError, first_line
from fedweave.files import atomic_folder, files_sha256
from fedweave.inference.model import FedWeaveModel
from fedweave.json_files import write_json
from fedweave.router.routed import SHARED
from fedweave.schema import Description, RouterShape
from fedweave.settings import to_tree

SCHEMA = 1
SIGNATURES = "signatures.safetensors"


def write_bundle(target: Path, model: FedWeaveModel, origin: Origin, told: Experts | None = None) -> Description:
    """A model as a bundle, with what is ``told`` of its experts; returns what fedweave.json holds."""
    description = describe(model, origin)
    with new_folder(target) as partial:
        has_template = write_tokenizer(partial, model.backbone.prompts)
        tokenizer = list(partial.iterdir())
        for name, tensors in named_adapters(model):
            write_adapter(partial / name, tensors, description)
            check_adapter(partial / name, model, model.experts.only(name)[1])
            for file in tokenizer:  # for programs that know this folder alone
                _name_again(file, partial / name / file.name)
        _write_router(partial, model)
        if (kept := origin.kept) is not None:
            save_file({"signatures": kept.means.cpu().contiguous()}, partial / SIGNATURES)
            description["kept"] = {
                "own": kept.own, "halfway": kept.halfway, "buckets": kept.buckets, "made": kept.made
            }  # fmt: skip
        if told is not None:
            write_experts(partial, told)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        names = [str(path.relative_to(partial)) for path in files]
        description["files"] = dict(zip(names, files_sha256(files), strict=True))
        (partial / "README.md").write_text(model_card(model, origin, told, has_template), encoding="utf-8")
        write_json(partial / "fedweave.json", description)
    remember(model.backbone.fingerprint, origin.config.backbone.model)
    return description


def write_soft(target: Path, model: FedWeaveModel, description: Description, weights: Sequence[float]) -> None:
    """One PEFT adapter of rank M·r + R: the experts side by side, each B with its weight, and what they share."""
    layout = model.mixture.layout
    gates = mixture_weights(weights, layout.experts)
    with new_folder(target) as partial:
        partial.rmdir()
        write_adapter(partial, layout.mixed(model.theta.cpu(), gates), description)
        check_adapter(partial, model, gates)
        prompting = how_a_prompt_looks(model.backbone.prompts, write_tokenizer(partial, model.backbone.prompts))
        card = soft_card(description, gates.tolist(), prompting)
        (partial / "README.md").write_text(card, encoding="utf-8")


def write_merged(target: Path, model: FedWeaveModel, description: Description, expert: int) -> None:
    """A dense model folder: the backbone with one expert, and what it shares, added into its weights."""
    backbone = model.backbone
    with new_folder(target) as partial:
        merge(model, expert)
        backbone.model.generation_config.eos_token_id = backbone.end_ids  # where answers were trained to end
        backbone.model.save_pretrained(partial)
        prompting = how_a_prompt_looks(backbone.prompts, write_tokenizer(partial, backbone.prompts))
        (partial / "README.md").write_text(merged_card(description, expert, prompting), encoding="utf-8")


def merge(model: FedWeaveModel, expert: int) -> None:
    """Add an expert, and what it shares, into the backbone's weights: from now on its model is dense."""
    layout = model.mixture.layout
    if not 0 <= expert < layout.experts:
        raise UserError(f"there is no expert {expert}; the model has experts 0 to {layout.experts - 1}.")
    expected = probe(model, model.experts.only(f"expert_{expert}")[1])
    unpack(model.backbone.model)
    with torch.no_grad():
        named = layout.named(model.theta, expert)
        for name in layout.names:
            a, b = (named[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
            weight = model.backbone.model.get_submodule(name).weight  # [out, in]
            weight.copy_(weight.float() + model.mixture.scale * b @ a)
    compare(f"the dense model of expert {expert}", probe(model), expected, model.backbone.dtype)


def named_adapters(model: FedWeaveModel) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Every adapter that a prompt may need, in PEFT's names and shapes: an expert has what all share in it."""
    layout, theta = model.mixture.layout, model.theta.cpu()
    for m, name in enumerate(model.experts.adapter_names):
        nobody = torch.zeros(layout.experts)
        yield name, layout.mixed(theta, nobody, ()) if name == SHARED else layout.named(theta, m)


def mixture_weights(weights: Sequence[float], experts: int) -> torch.Tensor:
    """[M]: one weight per expert, none negative, together 1."""
    gates = torch.tensor(list(weights), dtype=torch.float32)
    if len(gates) != experts:
        raise UserError(f"--soft needs {experts} weights, one per expert, not {len(gates)}.")
    if not torch.isfinite(gates).all() or (gates < 0).any() or abs(gates.sum().item() - 1) > 1e-3:
        raise UserError("--soft needs weights that are not negative and sum to 1, as in 0.5,0.3,0.2.")
    return gates


def describe(model: FedWeaveModel, origin: Origin) -> Description:
    """Everything that loading needs and that the tensors do not say."""
    config, layout = origin.config, model.mixture.layout
    return {
        "schema": SCHEMA,
        "method": config.method,
        "round": origin.round,
        "seed": config.seed,
        # given away, it tells no path of this machine
        "backbone": to_tree(config.backbone) | {"model": public_name(config.backbone.model)},
        "base_model": origin.base,
        "fingerprint": model.backbone.fingerprint,
        "experts": layout.experts,
        "rank": layout.rank,
        "shared": layout.shared,
        "span": config.experts.span,
        "alpha": config.experts.alpha,
        "target_modules": spelled_out(config.experts.target_modules, layout.names),
        "router": cast(RouterShape, asdict(model.experts.router)) if model.experts.router else None,
        "shares": model.experts.shares,
        "feature": "mean over prompt tokens of the bare backbone's last hidden states, after the final norm",
        "files": {},
    }


def require_new(target: Path) -> None:
    """What exists is never written over; worth a look before a model is loaded."""
    if target.exists():
        raise UserError(f"{target} exists; choose another folder.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder that appears whole or not at all."""
    require_new(target)
    try:
        with atomic_folder(target, shared=True) as partial:
            yield partial
            _share(partial)
    except Exception as error:  # tokenizers has nothing narrower for a full disk
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        raise UserError(
            f"{target} cannot be written: {getattr(error, 'strerror', None) or first_line(error)}."
        ) from error


def _name_again(file: Path, name: Path) -> None:
    """The same file under another name, where the disk knows such a thing: a hundred experts need one tokenizer."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)


def _share(folder: Path) -> None:
    """safetensors writes files for their owner alone; a server may run as someone else."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def _write_router(folder: Path, model: FedWeaveModel) -> None:
    """The routers' weights under their names; with several, name.N."""
    router, phi = model.experts.router, model.experts.phi
    if router is None or phi is None:
        return
    tensors = {
        f"{name}.{r}": tensor.clone()
        for r, row in enumerate(phi.cpu())
        for name, tensor in router.views(row).items()
    }
    save_file(tensors, folder / "router.safetensors")
