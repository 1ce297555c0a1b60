"""What server and sites tell each other, as letters: the broadcast state, and the four kinds of answers.

This module is the whole list of what can leave a site. An answer is read by the server as a stranger's: whatever
does not have the expected name, shape and type is :class:`Refused`, or left to the intake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedweave.federation.client import Prototypes
from fedweave.federation.intake import Refused, check_arrays
from fedweave.federation.letters import Letter
from fedweave.federation.parcel import ROUTER, Parcel, expert_name
from fedweave.router.mlp import RouterLayout

if TYPE_CHECKING:
    from fedweave.federation.engine import Engine
    from fedweave.methods.base import ServerState

_BF16 = ":bf16"  # numpy has no bfloat16; its bits travel as int16 under a marked name


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    arrays = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        if flat.dtype == torch.bfloat16:
            name, flat = name + _BF16, flat.view(torch.int16)
        arrays[name] = flat.numpy()
    return arrays


def to_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(np.array(array))  # a copy: what came over the network may be read-only
        if name.endswith(_BF16) and tensor.dtype == torch.int16:
            name, tensor = name.removesuffix(_BF16), tensor.view(torch.bfloat16)
        tensors[name] = tensor
    return tensors


# -------------------------------------------------------------------------------------- the server asks


def router_facts(router: RouterLayout) -> dict[str, Any]:
    return {"width": router.width, "hidden": router.hidden, "router_experts": router.experts, "scale": router.scale}


def read_router(letter: Letter) -> RouterLayout | None:
    facts: dict[str, Any] = letter.facts
    if "hidden" not in facts:
        return None
    return RouterLayout(facts["width"], facts["hidden"], facts["router_experts"], facts["scale"])


def state_letter(state: ServerState, t: int) -> Letter:
    """The broadcast of a round: experts and routers."""
    tensors = {"theta": state.theta} | ({"phi": state.phi} if state.phi is not None else {})
    facts: dict[str, Any] = {
        "t": t, "rank": state.layout.rank, "experts": state.layout.experts, "shares": state.shares
    }  # fmt: skip
    return Letter(to_arrays(tensors), facts | (router_facts(state.router) if state.router else {}))


def read_state(letter: Letter, bench: Engine) -> tuple[ServerState, int]:
    """The broadcast as a site uses it, on the site's device."""
    from fedweave.methods.base import ServerState

    facts: dict[str, Any] = letter.facts
    tensors = {name: tensor.to(bench.device) for name, tensor in to_tensors(letter.arrays).items()}
    layout = bench.layout(facts["rank"], facts["experts"])
    state = ServerState(layout, read_router(letter), tensors["theta"], tensors.get("phi"), list(facts["shares"]))
    return state, facts["t"]


# -------------------------------------------------------------------------------------- a site answers


def prototypes_letter(told: Prototypes) -> Letter:
    arrays = to_arrays({"signatures": told.signatures}) if told.signatures.numel() else {}
    return Letter(arrays, {
        "sizes": told.sizes, "note": told.note, "tried": list(told.silhouettes),
        "silhouettes": list(told.silhouettes.values()), "assignment": told.assignment,
    })  # fmt: skip


def read_prototypes(letter: Letter, width: int, dtype: torch.dtype) -> Prototypes:
    """``width`` and ``dtype`` are those of a signature; no width: the method has none."""
    sizes, assignment = whole_numbers(letter, "sizes"), whole_numbers(letter, "assignment")
    if not sizes or min(sizes) < 1:
        raise Refused("it names no bucket, or an empty one")
    tensors = to_tensors(letter.arrays)
    check_arrays(tensors, {"signatures": ((len(sizes), width), dtype)} if width else {})
    silhouettes: Any = letter.facts.get("silhouettes", [])
    tried = whole_numbers(letter, "tried")
    return Prototypes(
        sizes,
        tensors.get("signatures", torch.empty(0, 0)),
        str(letter.facts.get("note", ""))[:200],
        {k: float(s) for k, s in zip(tried, silhouettes, strict=False)} if isinstance(silhouettes, list) else {},
        assignment,
    )


def read_starts(letter: Letter, size: int) -> list[tuple[int, torch.Tensor, float]]:
    """(expert, mean adapter, buckets) of a site; ``size`` is P of one expert."""
    experts, buckets = whole_numbers(letter, "experts"), whole_numbers(letter, "buckets")
    if len(experts) != len(buckets) or any(n < 1 for n in buckets):
        raise Refused("it does not say how many buckets its adapters stand for")
    tensors = to_tensors(letter.arrays)
    check_arrays(tensors, {expert_name(m): ((size,), torch.float32) for m in experts})
    return [(m, tensors[expert_name(m)], float(n)) for m, n in zip(experts, buckets, strict=True)]


def parcel_letter(parcel: Parcel) -> Letter:
    return Letter(to_arrays(parcel.arrays), {
        "t": parcel.round, "counts": parcel.counts, "samples": parcel.samples, "losses": parcel.losses,
        "tokens": parcel.tokens, **parcel.identity,
    })  # fmt: skip


def read_parcel(letter: Letter, client: int) -> Parcel:
    """Nothing is checked here: a parcel goes through the intake. Who sent it is what the transport says."""
    facts: dict[str, Any] = letter.facts
    return Parcel(
        client, facts.get("t", -1), {name: facts.get(name, "") for name in ("backbone", "tokenizer")},
        to_tensors(letter.arrays), facts.get("counts", []), facts.get("samples", 0), facts.get("losses", []),
        facts.get("tokens", -1),
    )  # fmt: skip


def router_letter(delta: torch.Tensor, samples: int) -> Letter:
    return Letter(to_arrays({ROUTER: delta}), {"samples": samples})


def read_router_update(letter: Letter, size: int, most: int) -> tuple[torch.Tensor, int]:
    from fedweave.federation.intake import check_samples

    tensors = to_tensors(letter.arrays)
    check_arrays(tensors, {ROUTER: ((size,), torch.float32)})
    samples: Any = letter.facts.get("samples", 0)
    check_samples(samples, most)
    return tensors[ROUTER], samples


def whole_numbers(letter: Letter, name: str) -> list[int]:
    values = letter.facts.get(name, [])
    if not isinstance(values, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise Refused(f"{name} must be a list of whole numbers")
    return [int(v) for v in values]
