"""What one would write with PEFT: clients one after another, padded batches, a module per adapter.

``one_lora`` is FedIT's local training. ``soft_mixture`` is FedWeave's: M adapters whose outputs are gated by hooks,
and a second forward pass, adapters off, that gives the router its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.workload import TARGETS
from fedweave.training.batch import ClientData

RATE, ROUTER_RATE, CLIP, HIDDEN = 1e-4, 5e-5, 1.0, 512


def _padded(client: ClientData, indices: np.ndarray, device: torch.device) -> tuple[torch.Tensor, ...]:
    rows = [client.examples[i] for i in indices]
    longest = max(len(e.ids) for e in rows)
    ids, mask, labels = (np.full((len(rows), longest), fill) for fill in (0, 0, -100))
    prompt = np.zeros((len(rows), longest))
    for r, e in enumerate(rows):
        ids[r, : len(e.ids)], mask[r, : len(e.ids)] = e.ids, 1
        labels[r, e.answer_start : len(e.ids)] = e.ids[e.answer_start :]
        prompt[r, : e.answer_start] = 1
    return tuple(torch.from_numpy(x).to(device) for x in (ids, mask, labels, prompt))


def _train(model: Any, parameters: list[dict], loss_of: Callable[[np.ndarray], torch.Tensor], plan: list) -> None:
    everything = [p for group in parameters for p in group["params"]]
    optimiser = torch.optim.AdamW(parameters, weight_decay=0.0)
    for indices in plan:
        loss_of(indices).backward()
        torch.nn.utils.clip_grad_norm_(everything, CLIP)
        optimiser.step()
        optimiser.zero_grad()


def _adapters(model: Any, rank: int, count: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=16, lora_dropout=0.1, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    wrapped: Any = get_peft_model(model, config, adapter_name="expert_0")
    for m in range(1, count):
        wrapped.add_adapter(f"expert_{m}", config)
    wrapped.base_model.set_adapter([f"expert_{m}" for m in range(count)])
    return wrapped.train()


def one_lora(model: Any, clients: list[ClientData], plan: list, device: torch.device) -> Callable[[], None]:
    """A round of one rank-32 LoRA."""
    model.set_attn_implementation("sdpa")
    wrapped = _adapters(model, 32, 1)
    parameters = [p for p in wrapped.parameters() if p.requires_grad]

    def round_() -> None:
        for client, own in zip(clients, plan, strict=True):

            def loss_of(indices: np.ndarray, client: ClientData = client) -> torch.Tensor:
                ids, mask, labels, _ = _padded(client, indices, device)
                return wrapped(input_ids=ids, attention_mask=mask, labels=labels).loss

            _train(wrapped, [{"params": parameters, "lr": RATE}], loss_of, own)

    return round_


def soft_mixture(
    model: Any, clients: list[ClientData], plan: list, device: torch.device, experts: int = 4
) -> Callable[[], None]:
    """A round of the soft mixture of M rank-8 experts with its router."""
    model.set_attn_implementation("sdpa")
    wrapped = _adapters(model, 8, experts)
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    width = model.config.hidden_size
    router = torch.nn.Sequential(
        torch.nn.Linear(width, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, experts)
    ).to(device)
    gates: list[torch.Tensor] = []

    def gate(m: int) -> Callable:
        return lambda module, args, output: output * gates[0][:, m, None, None].to(output.dtype) if gates else None

    for name, module in wrapped.named_modules():
        if ".lora_B.expert_" in name:
            module.register_forward_hook(gate(int(name.rsplit("_", 1)[1])))

    def round_() -> None:
        for client, own in zip(clients, plan, strict=True):

            def loss_of(indices: np.ndarray, client: ClientData = client) -> torch.Tensor:
                ids, mask, labels, prompt = _padded(client, indices, device)
                gates.clear()
                with torch.no_grad(), wrapped.disable_adapter():
                    hidden = wrapped.base_model.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
                weight = prompt / prompt.sum(1, keepdim=True)
                feature = (hidden.float() * weight[..., None].float()).sum(1)
                gates.append(F.softmax(router(feature), -1))
                return wrapped(input_ids=ids, attention_mask=mask, labels=labels).loss

            groups = [
                {"params": parameters, "lr": RATE},
                {"params": list(router.parameters()), "lr": ROUTER_RATE},
            ]
            _train(wrapped, groups, loss_of, own)

    return round_
