"""The settings of the method itself: experts, router, discovery, alignment, training and living on."""

from dataclasses import dataclass, field, replace
from typing import Literal

from fedweave.settings import setting


@dataclass(frozen=True)
class ExpertsConfig:
    """The LoRA experts."""

    rank: int = setting(8, "Rank of one expert.", low=1, high=4096)
    single_rank: int = setting(
        32, "Rank of single-adapter methods: what four experts have together.", low=1, high=4096
    )
    alpha: float = setting(16.0, "LoRA scale is alpha / rank.", low=1e-6)
    dropout: float = setting(0.05, "Dropout on the input of A.", low=0.0, high=0.9)
    shared_rank: int = setting(
        0,
        "Rank of a part that every prompt uses beside its expert and every client trains, a multiple of rank; "
        "0: experts share nothing. FedWeave, its ablations and the oracle have one.",
        low=0,
        high=4096,
    )
    start: Literal["warmup", "zero"] = setting(
        "warmup", "What experts start from: the mean of their buckets' warmup adapters (the paper), or B = 0."
    )
    labels: Literal["buckets", "router"] = setting(
        "buckets",
        "Which expert a training example belongs to: its bucket's, or the one that the router picks for it after "
        "its warm start, as it would at inference.",
    )
    min_share: float = setting(
        0.02, "labels=router: an expert with a smaller share of all examples is dropped.", low=0.0, high=0.5
    )
    temperature: float = setting(
        0.0,
        "labels=router, router.training=chosen: in every round an example's expert is drawn from the router's "
        "weights at this temperature, among those that its client serves; 0: always the one it picks.",
        low=0.0,
        high=100.0,
    )
    rest: float = setting(
        0.0,
        "router.training=chosen: share of a client's examples that pass the shared part alone in a round, so that "
        "it can stand alone for prompts like none before.",
        low=0.0,
        high=0.9,
    )
    target_modules: tuple[str, ...] = setting(
        ("q_proj", "v_proj"),
        "Linear layers that carry experts, by the end of their names; all-linear: every one but the output layer.",
        low=1,
    )
    span: Literal["all", "answer"] = setting(
        "all",
        "Tokens that experts see, in training and in use: all, or those from the prompt's last one on, which the "
        "answer's first comes from; the bare backbone reads the rest. An experiment: no other program does so.",
    )


@dataclass(frozen=True)
class WarmStartConfig:
    """Router warm start: learn the alignment's own labels a(i,c) from cached features before round 0."""

    enabled: bool = setting(True, "Switch it on; the paper's method has none.")
    rounds: int = setting(10, "How often the server averages during the warm start.", low=1, high=1_000_000)
    steps: int = setting(20, "Steps of each client between two averages.", low=1, high=1_000_000)
    lr: float = setting(1e-3, "AdamW rate of the warm start.", low=0.0)
    batch_size: int = setting(64, "Features in a step.", low=1, high=100_000)
    contrast: Literal["auto", "own", "all"] = setting(
        "auto",
        "Experts that a client's router learns to tell apart: its own, which takes clients with several, or all. "
        "auto is own where that links all experts, and all otherwise.",
    )

    @property
    def in_shorter_turns(self) -> "WarmStartConfig":
        """As many steps in all, averaged four times as often."""
        return replace(self, rounds=4 * self.rounds, steps=-(-self.steps // 4))


@dataclass(frozen=True)
class RouterConfig:
    """The router: Linear(d, hidden), GELU, Linear(hidden, M), softmax."""

    hidden: int = setting(512, "Width of the hidden layer.", low=1, high=65_536)
    lr: float = setting(5e-5, "AdamW rate of the router.", low=0.0)
    features: Literal["raw", "unit"] = setting(
        "raw", "Input scale: raw is the pooled state itself, unit brings each to root-mean-square 1."
    )
    training: Literal["auto", "soft", "chosen"] = setting(
        "auto",
        "soft: an example passes all experts, weighted by the router, which learns (the paper); chosen: only its "
        "own expert, and the router stays as its warm start left it and sends nothing; auto: chosen where experts "
        "may open in mid-run (living.notice), for a router that goes on learning loses them again, else soft.",
    )
    gate: Literal["full", "sure"] = setting(
        "full",
        "How much a kept expert counts: fully, or as much as the router is sure of it, so that the shared part "
        "carries the rest.",
    )
    familiar: float | Literal["auto"] = setting(
        "auto",
        "Share of prompts of the clients' kinds that count as familiar; one that lies farther out gets the "
        "shared part alone, or the bare backbone where there is none. 1: all prompts are familiar. auto is "
        "0.98 where the feature is of the user's words (backbone.pool=content or prompt=plain), else 1; and 1 "
        "with privacy, since sums of features leave the clients for it.",
        low=0.5,
        high=1.0,
    )
    doubt: float = setting(
        1.0,
        "Experts answer prompts up to so many times as strange as router.familiar allows, as --doubt says later.",
        low=0.0,
        high=1e9,
    )
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


@dataclass(frozen=True)
class DiscoveryConfig:
    """Step 1: buckets and their signatures."""

    clusterer: Literal["kmeans", "agglomerative", "spectral"] = setting("kmeans", "Local clusterer.")
    features: Literal["standard", "unit"] = setting(
        "standard",
        "What is clustered: unit-length features (the paper), or features whose channels the client first "
        "brings to mean 0 and deviation 1, since a few huge channels otherwise decide every distance.",
    )
    max_buckets: int = setting(8, "Candidates are 2 … min(max_buckets, n - 1).", low=1, high=1000)
    least_silhouette: float = setting(
        -1.0, "One bucket where no candidate's silhouette is above it; -1: never.", low=-1.0, high=1.0
    )
    restarts: int = setting(10, "Restarts of k-means.", low=1, high=10_000)
    warmup_steps: int = setting(10, "Optimiser steps of a bucket's warmup adapter.", low=1, high=1_000_000)
    warmup_batch: int = setting(8, "Batch size of the warmup.", low=1, high=100_000)
    warmup_lr: float | Literal["auto"] = setting(
        "auto", "AdamW rate of the warmup; auto is training.lr, as in the paper.", low=0.0
    )
    sketch: int = setting(
        0,
        "Numbers per LoRA-B block that a signature is projected to, so that it is kilobytes and not megabytes; 64 "
        "is plenty, 0 sends the blocks whole.",
        low=0,
        high=1_000_000,
    )


@dataclass(frozen=True)
class AlignmentConfig:
    """Step 2: buckets to experts."""

    max_experts: int = setting(8, "Candidates for M are 2 … min(max_experts, P - 1).", low=1, high=1000)
    linkage: Literal["average", "ward"] = setting(
        "average", "What is merged next: the clusters nearest on average, or those whose spread grows least."
    )
    least_silhouette: float = setting(
        -1.0, "One expert for all where no candidate's silhouette is above it; -1: never.", low=-1.0, high=1.0
    )
    min_share: float = setting(
        0.0, "A candidate with an expert of a smaller share of all examples is left out.", low=0.0, high=0.5
    )


@dataclass(frozen=True)
class PrivacyConfig:
    """Differential privacy (docs/privacy.md): what can be learned of one client, or of one example."""

    level: Literal["none", "client", "example"] = setting(
        "none",
        "Whom noise protects: nobody, every client with all that it has, or every single example. It is added at "
        "the client, so that the server is not trusted with it.",
    )
    epsilon: float = setting(
        8.0, "What a whole run may spend, all steps together; the noise is solved from it.", low=1e-3, high=1e6
    )
    delta: float = setting(1e-5, "The probability that belongs to it.", low=1e-15, high=0.1)
    clip: float = setting(
        1.0,
        "Longest contribution, as a norm: level=client, of all that a client sends in a step; level=example, of an "
        "example's gradient over experts and router. Noise is in proportion to it.",
        low=1e-9,
    )


@dataclass(frozen=True)
class TrainingConfig:
    """Step 3: rounds of local training."""

    rounds: int = setting(20, "Communication rounds T.", low=0, high=1_000_000)
    local_steps: int = setting(10, "Steps E of each client and round.", low=1, high=1_000_000)
    batch_size: int = setting(8, "Examples in a step; a smaller bucket gives smaller batches.", low=1, high=100_000)
    batches: Literal["buckets", "mixed"] = setting(
        "buckets", "A batch comes from one bucket, buckets taking turns (the paper), or from the whole client."
    )
    lr: float = setting(1e-4, "AdamW rate of the adapters.", low=0.0)
    schedule: Literal["constant", "late"] = setting(
        "constant", "How all rates change over the rounds; late: constant for half of them, then linearly to 0."
    )
    weighting: Literal["token", "example"] = setting(
        "token", "What counts alike in a step's loss: every answer token, or every example whatever its length."
    )
    patience: int = setting(
        0,
        "Rounds without a better validation loss after which the run goes back to its best state and on at half of "
        "its rates; a fourth time in a row it ends. 0: never.",
        low=0,
    )
    clip: float = setting(1.0, "Gradient norm per client, over its experts and router together.", low=1e-9)
    weight_decay: float = setting(0.0, "AdamW weight decay.", low=0.0)
    participation: float = setting(1.0, "Clients per round: up to 1 a fraction, above 1 a count.", low=1e-9)
    clients_per_step: int | Literal["auto"] = setting(
        "auto", "Clients trained in one forward and backward pass; bounds memory, never changes results."
    )
    checkpointing: Literal["auto", "on", "off"] = setting(
        "auto",
        "Keep the inputs of the model's layers alone, and run each a second time on the way back: much less memory "
        "for about 40 % more time, and the same results. auto: where that is faster than clients in more groups.",
    )
    fp8: Literal["off", "forward", "both"] = setting(
        "off",
        "Products with frozen weights in 8 bits while training (GPUs from Ada and Hopper on): the forward pass's, "
        "or the gradients' as well. Everything that is measured or served stays in bfloat16.",
    )
    cuda_graphs: bool = setting(
        True,
        "On CUDA, record a training step once and replay it where launching its kernels would take longer than "
        "running them; false for debugging.",
    )


@dataclass(frozen=True)
class LivingConfig:
    """Data that change between rounds, and experts that open for them (docs/living.md)."""

    notice: Literal["off", "open", "ask"] = setting(
        "off",
        "What becomes of rows whose kind no expert knows. off: they join the nearest expert; open: a new one "
        "opens; ask: they are kept apart until the run is resumed with open.",
    )
    start: Literal["experts", "nearest"] = setting(
        "experts",
        "What an expert that opens starts from: what experts.start says, or a copy of the expert whose signature "
        "is nearest.",
    )
    turns: int | Literal["auto"] = setting(
        "auto",
        "How often the server averages while the router learns to tell a new kind from the others, each time after "
        "three times router.warm_start.steps steps; auto: a third of router.warm_start.rounds. More make it surer, "
        "so that experts.temperature draws fewer of the new kind's examples for old experts.",
        low=1,
        high=1000,
    )
    lessons: int = setting(
        0,
        "Times that the clients of a new kind teach its expert alone, beside what all experts share, before its "
        "first round; each has training.local_steps steps. The oracle's new experts have them, too.",
        low=0,
        high=1000,
    )
    alarms: float = setting(
        0.05,
        "Share of the buckets of known kinds that may be taken for a new one; n aligned buckets can promise no "
        "less than 1 in n + 1.",
        low=1e-6,
        high=0.5,
    )
    alone: int = setting(
        1,
        "Experts that one client alone may open, until somebody else feeds them, too; whatever more it brings is "
        "kept apart until others bring it or the run is resumed with a higher number.",
        low=0,
    )
    merge: bool = setting(
        False, "Make one of two experts that have become alike, where one of them opened in mid-run."
    )
    retire: int = setting(
        0, "Rounds after which an expert that nobody feeds closes; 0: it stays, as it is, for good.", low=0
    )
    least: int = setting(
        16, "New rows that a client waits for before it forms buckets of them, and that a new expert needs.", low=2
    )


@dataclass(frozen=True)
class AttackConfig:
    """Hostile clients of a simulation, to see what a rule is worth (docs/trust.md); they follow from the seed."""

    kind: Literal["none", "absent", "flip", "shout", "claim", "inflate", "labels", "bucket"] = setting(
        "none",
        "absent: no attack, they answer nothing at all, which is what a rule that leaves them out is held against; "
        "flip: the opposite of what was learned; shout: eight times the opposite; claim: the opposite, for all "
        "experts; inflate: the opposite, with a thousand times as many examples; labels: trained on other rows' "
        "answers; bucket: trained on one wrong answer to prompts of one kind, the first in the alphabet.",
    )
    clients: float = setting(0.05, "Hostile clients, as a share of all; above 0 one at least.", low=0.0, high=1.0)
    after: int = setting(
        0,
        "Rounds in which they turn nothing around yet, nor in the warm start: who has a good name does more harm. "
        "Rows that labels and bucket spoil are spoilt from the beginning.",
        low=0,
        high=1_000_000,
    )
