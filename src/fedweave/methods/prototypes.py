"""The two questions before round 1: which units of specialisation do you have, and what should experts start from?

A method says what its units are (clusters of prompts, whole clients, labels); the rest is the same for all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

import numpy as np
import torch

from fedweave.config import Config
from fedweave.discovery.signatures import Signatures
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.client import Client
from fedweave.federation.compute import Compute, VectorBuffer
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.method import Method
from fedweave.federation.private import shield_of, shielded
from fedweave.federation.steps import FIGURE, Answer, Asked, Figure, Part, Step, Summed, adam_reach
from fedweave.federation.train import EXPERTS, expert_name
from fedweave.streams import stream_key
from fedweave.training.batch import Lane
from fedweave.training.private import normal
from fedweave.training.schedule import bucket_batches


@dataclass
class Prototypes:
    """What a client tells after lines 1 to 4: how many buckets, how large, and their signatures."""

    sizes: list[int]
    signatures: torch.Tensor  # [buckets, D] s(i,c); no rows where a method has none
    note: str = ""
    silhouettes: dict[int, float] | None = None  # of every candidate count
    labels: list[int] = field(default_factory=list)  # the task of every bucket, where a bound is told it


class Discover(Step[Prototypes]):
    """Lines 1 to 4: form buckets, warm up one LoRA per bucket, and sign them with their B matrices."""

    name = "discover"
    together = None  # all warmups march in lockstep

    def __init__(self, method: Method, signed: bool = True):
        self.method, self.config, self.signed = method, method.config, signed

    def signer(self, layout: AdapterLayout) -> Signatures:
        return Signatures(layout, self.config.discovery.sketch, self.config.seed)

    # ---------------------------------------------------------------------------------- client side

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        found = self.method.form_buckets(compute, clients)
        everything = [(client, c) for client in clients for c in range(len(client.buckets))]
        signatures = None
        if self.signed and self.config.privacy.level == "example":
            signatures = self.sum_up(compute, clients)
        elif self.signed:
            known = compute.recall("warmup", self._causes(clients), lambda: self.adapters(compute, everything))
            signatures = self.sign(compute, known, everything)
        for client, buckets in zip(clients, found, strict=True):
            parts = {}
            if signatures is not None:
                parts["signatures"] = torch.stack([next(signatures) for _ in client.buckets])
            yield Answer(parts, {
                "sizes": client.sizes, "note": client.note, "tried": list(buckets.silhouettes),
                "silhouettes": list(buckets.silhouettes.values()),
            })  # fmt: skip

    def _causes(self, clients: Sequence[Client]) -> Iterator[object]:
        """All that decides these clients' warmup adapters, beside the backbone."""
        config = self.config
        yield config.seed, config.experts, config.discovery, config.training
        for client in clients:
            rows = client.data.examples
            yield client.index, [(len(row.ids), row.answer_start) for row in rows]
            yield np.concatenate([row.ids for row in rows])
            yield from client.buckets

    def warm_up(self, compute: Compute, units: Sequence[tuple[Client, int]]) -> Iterator[torch.Tensor]:
        """Signatures of these buckets, warmed up for them."""
        return self.sign(compute, self.adapters(compute, units), units)

    def sign(
        self, compute: Compute, adapters: VectorBuffer, units: Sequence[tuple[Client, int]]
    ) -> Iterator[torch.Tensor]:
        """Signatures of these adapters, which stay with their clients until they are asked for."""
        signer, compute.adapters = self.signer(self._layout(compute)), adapters
        return (signer.of(adapters.read((client.index, c))) for client, c in units)

    def adapters(self, compute: Compute, units: Sequence[tuple[Client, int]]) -> VectorBuffer:
        """Warm these buckets up, all in lockstep from the one common start."""
        discovery, layout = self.config.discovery, self._layout(compute)
        start = first_adapter(layout, self.config.seed)
        lanes = []
        for client, c in units:
            key = ("warmup", self.config.seed, client.index, c)
            drawn = bucket_batches(client.buckets[c], discovery.warmup_batch, stream_key(*key))
            lane = Lane(client.data, list(islice(drawn, discovery.warmup_steps)), start, None, key)
            lanes.append(shielded(lane, self.config, client, StartExperts.name, discovery.warmup_batch))
        found = VectorBuffer(layout.size)
        # a few steps, once: to record them would take longer than to run them
        training = replace(self.config.training, lr=warmup_rate(self.config), cuda_graphs=False)
        trained = compute.train(layout, None, lanes, "warmup", training=training)
        for (client, c), result in zip(units, trained, strict=True):
            adapter = start + result.delta_theta.cpu()
            if not torch.isfinite(adapter).all():
                raise UserError(f"the warmup of {client.name!r} gave NaN or infinity; lower discovery.warmup_lr.")
            found.append((client.index, c), adapter)
        return found

    def _layout(self, compute: Compute) -> AdapterLayout:
        return AdapterLayout.of(compute.layers, self.config.experts.rank, 1)

    def sum_up(self, compute: Compute, clients: Sequence[Client]) -> Iterator[torch.Tensor]:
        """Signatures that tell little of any example: the sum of what each one's gradient alone would sign, all of
        one length, with noise. Of an adapter that was trained under noise nothing would be left to align."""
        signer = self.signer(self._layout(compute))
        start, clip = first_adapter(signer.layout, self.config.seed), self.config.privacy.clip
        for client in clients:
            key = ("warmup", self.config.seed, client.index, 0)
            everything = np.sort(np.concatenate(client.buckets))
            total = torch.zeros(sum(signer.widths))
            for some in compute.gradients(signer.layout, Lane(client.data, [everything], start, None, key)):
                signed = signer.of(some).float().nan_to_num(0.0)  # blocks are unit vectors; one that diverges is 0
                total += signed.sum(0) * (clip / len(signer.widths) ** 0.5)
            shield = shield_of(self.config, client, self.name, len(everything), key)
            total += normal(total, shield.noise * clip, "signature", shield.key)
            yield (total / len(everything)).to(signer.dtype)

    # ---------------------------------------------------------------------------------- server side

    def figures(self, asked: Asked) -> dict[str, Figure]:
        most = max(1, self.config.discovery.max_buckets)
        return {
            "sizes": Figure(int, 1, self.config.federation.max_samples, (1, most), examples=True),
            "note": Figure(str, high=200, veil=""),
            "tried": Figure(int, 0, most, (0, most), veil=[]),
            "silhouettes": Figure(float, -1.0, 1.0, (0, most), veil=[]),
        }

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        if len(figures["tried"]) != len(figures["silhouettes"]):
            raise Refused("it does not say which silhouette belongs to which count")
        return {"signatures": self.signatures(asked, len(figures["sizes"]))} if self.signed else {}

    def signatures(self, asked: Asked, buckets: int) -> Part:
        signer = self.signer(AdapterLayout.of(asked.layers, self.config.experts.rank, 1))
        return Part((buckets, sum(signer.widths)), signer.dtype, summed=False)

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Prototypes:
        sizes, signatures = [int(n) for n in figures["sizes"]], parts.get("signatures", torch.empty(0, 0))
        silhouettes = dict(zip(map(int, figures["tried"]), figures["silhouettes"], strict=True))
        return Prototypes(sizes, signatures, figures["note"], silhouettes)


Start = list[tuple[int, torch.Tensor, float]]  # (expert, mean of warmup adapters [P of one expert], buckets)


class StartExperts(Summed[Start]):
    """Line 6: the warmup adapters, averaged over a client's buckets that share an expert: no single one leaves."""

    name = "start"

    def __init__(self, discover: Discover):
        self.discover, self.config = discover, discover.config

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        units = [(client, c) for client in clients for c in self.asked_for(client.assignment, question)]
        known = compute.adapters
        if known is None or not all((client.index, c) in known for client, c in units):  # away in between
            known = compute.adapters = self.discover.adapters(compute, units)
        for client in clients:
            rows: dict[int, list[torch.Tensor]] = {}
            for c in self.asked_for(client.assignment, question):
                rows.setdefault(client.assignment[c], []).append(known.read((client.index, c)))
            parts = {expert_name(m): torch.stack(adapters) for m, adapters in rows.items()}
            yield Answer(parts, {"experts": list(rows), "buckets": [len(adapters) for adapters in rows.values()]})

    def asked_for(self, assignment: Sequence[int], question: Message) -> list[int]:
        """The buckets whose adapters are asked for: all that have an expert, or one of those that open."""
        return [c for c, m in enumerate(assignment) if m >= question.facts.get("first", 0)]

    def figures(self, asked: Asked) -> dict[str, Figure]:
        most = len(asked.member.assignment)
        return {"experts": Figure(int, length=(1, most)), "buckets": Figure(int, 1, most, (1, most))}

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        assignment = asked.member.assignment
        own = [assignment[c] for c in self.asked_for(assignment, asked.question)]
        claimed = dict(zip(figures["experts"], figures["buckets"], strict=False))
        if claimed != {m: own.count(m) for m in own} or len(figures["buckets"]) != len(claimed):
            raise Refused("it sends other experts than its buckets have")
        origin = self._first(asked)
        return {
            expert_name(m): Part((origin.numel(),), rows=True, limit=EXPERTS, origin=origin)
            for m in figures["experts"]
        }

    def reach(self, asked: Asked, limit: str, size: int) -> tuple[float, str]:
        steps = self.config.discovery.warmup_steps
        return adam_reach(steps, warmup_rate(self.config), size), "the farthest that the warmup's steps can lead"

    def totals(self, asked: Asked) -> dict[str, tuple[int, ...]]:
        size, experts = self._first(asked).numel(), asked.question.facts["experts"]
        return {**{expert_name(m): (size,) for m in range(experts)}, f"{FIGURE}buckets": (experts,)}

    def summands(self, asked: Asked, answer: Answer) -> dict[str, torch.Tensor]:
        first, found = self._first(asked), {}
        buckets = torch.zeros(asked.question.facts["experts"], dtype=torch.float64)
        for m, count in zip(answer.figures["experts"], answer.figures["buckets"], strict=True):
            found[expert_name(m)] = count * (answer.parts[expert_name(m)].mean(0) - first).double()
            buckets[m] = count
        return found | {f"{FIGURE}buckets": buckets}

    def read_total(self, asked: Asked, totals: dict[str, torch.Tensor], clients: int) -> Start:
        first, buckets = self._first(asked), totals[f"{FIGURE}buckets"].round()
        means = [(m, totals[expert_name(m)] / float(n), float(n)) for m, n in enumerate(buckets) if n > 0]
        if self.config.privacy.level != "client":
            for _, mean, _ in means:
                self.check_mean(asked, EXPERTS, mean)
        return [(m, first + mean.float(), n) for m, mean, n in means]

    def _first(self, asked: Asked) -> torch.Tensor:
        return first_adapter(AdapterLayout.of(asked.layers, self.config.experts.rank, 1), self.config.seed)

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Start:
        found: Start = []
        for m, buckets in zip(figures["experts"], figures["buckets"], strict=True):
            rows = parts[expert_name(m)]
            if len(rows) not in (1, buckets):
                raise Refused("it sends another number of adapters than it has buckets")
            found += [(m, row, buckets / len(rows)) for row in rows]
        return found


@lru_cache(maxsize=2)
def first_adapter(layout: AdapterLayout, seed: int) -> torch.Tensor:
    """[P of one expert] where all warmups start."""
    return layout.initial(seed)


def warmup_rate(config: Config) -> float:
    rate = config.discovery.warmup_lr
    return config.training.lr if rate == "auto" else rate
