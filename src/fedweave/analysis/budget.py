"""Cost accounting (paper, Table 5 and Appendix B) from shapes alone: parameters, bytes, steps, memory.

What a method trains and sends is its own ``payload``; here it meets a model's shape and a config.
"""

from dataclasses import asdict, dataclass

from fedweave.analysis.shapes import ModelShape
from fedweave.config import Config
from fedweave.discovery.signatures import Signatures
from fedweave.errors import UserError, nearest
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.method import Payload, Sizes
from fedweave.methods import METHODS, method_class
from fedweave.methods.familiar import familiar_share
from fedweave.router.mlp import RouterLayout
from fedweave.training.fit import USABLE, choose, most_lanes
from fedweave.training.memory import Step, StepMemory
from fedweave.training.pace import Pace

# Bytes of one number in an update; int8 has one float32 scale for every 256 numbers.
PRECISIONS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256}
_FULL = 4  # warmup adapters and what the server broadcasts travel in float32
CARDS = (8, 16, 24, 48, 80)  # GiB
CONTEXT = 0.7 * 2**30  # bytes that CUDA and compiled kernels take beside all tensors
_GIB = 2**30


@dataclass(frozen=True)
class Discovery:
    """What happens once, before round 1."""

    buckets: float  # C_i
    signature_numbers: int  # d_B, or as many as discovery.sketch leaves of it
    signature_bytes: int  # of one bucket
    client_bytes: float  # of all buckets of a client
    adapter_bytes: int  # the warmup adapter of one bucket, A and B, which the expert's start is averaged from
    warmup_steps: float  # of a client
    training_steps: int  # of a client, in all rounds
    warmup_ratio: float  # C_i / 20 in the paper's setting
    warm_start_bytes: int  # router states that a client sends during the router's warm start
    familiar_bytes: int  # sums of features and of their products, from which the server knows strange prompts


@dataclass(frozen=True)
class Card:
    """What fits into one."""

    gib: int
    kept: int  # clients at a time with all activations kept; 0: not one
    again: int  # with layers that run twice
    chosen: str  # what clients_per_step and checkpointing make of it: "kept", "again", or "" where nothing fits


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak with all clients of a round together, by part, and what cards hold."""

    clients: int
    examples: int  # of a client's step
    tokens: float  # of an example
    kept: dict[str, float]  # bytes with all activations kept
    again: dict[str, float]  # with layers that run twice
    cards: list[Card]


@dataclass(frozen=True)
class Budget:
    """Everything that can be said before a run; ``as_dict`` is what reports read."""

    model: str
    parameters: int  # of the frozen backbone
    precision: str  # of the updates that clients send
    rounds: int
    methods: dict[str, Payload]
    discovery: Discovery
    memory: Memory  # of the config's method

    def round_bytes(self, method: str) -> tuple[int, int]:
        """(sent, received) by one client in one round, at most."""
        payload = self.methods[method]
        return round(payload.up * PRECISIONS[self.precision]), payload.down * _FULL

    def as_dict(self) -> dict:
        tree = asdict(self)
        for name, row in tree["methods"].items():
            row["up_bytes"], row["down_bytes"] = self.round_bytes(name)
        return tree


def predict(
    shape: ModelShape,
    config: Config,
    experts: int = 4,
    buckets: float = 4,
    precision: str | None = None,
    served: int | None = None,
    tokens: float = 115,
) -> Budget:
    """The budget of ``config`` on a model of this shape, if discovery finds so many experts and buckets. Memory
    depends on an example's ``tokens``, 115 on average in the paper's tasks."""
    precision = precision or config.federation.update_dtype
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision!r} is not known: {nearest(precision, PRECISIONS)}")
    targets = config.experts.target_modules
    stacked = shape.layout(targets, config.experts.rank, experts, config.experts.shared_rank)
    router = RouterLayout(shape.width, config.router.hidden, experts)
    single = shape.layout(targets, config.experts.single_rank, 1)
    served = experts if served is None else served
    sizes = Sizes(single, stacked, router, served, config.trains_router)
    signer = Signatures(stacked.with_experts(1), config.discovery.sketch, config.seed)
    signature = sum(signer.widths) * signer.dtype.itemsize
    training, warm_start = config.training, config.router.warm_start
    steps = training.rounds * training.local_steps
    warmup = buckets * config.discovery.warmup_steps
    methods = {name: method_class(name).payload(sizes) for name in METHODS}
    own = methods[config.method]
    carried = stacked if own.experts > 1 else single
    return Budget(
        model=shape.name,
        parameters=shape.parameters,
        precision=precision,
        rounds=training.rounds,
        methods=methods,
        discovery=Discovery(
            buckets=buckets,
            signature_numbers=sum(signer.widths),
            signature_bytes=signature,
            client_bytes=buckets * signature,
            adapter_bytes=stacked.with_experts(1).size * _FULL if config.experts.start == "warmup" else 0,
            warmup_steps=warmup,
            training_steps=steps,
            warmup_ratio=warmup / steps if steps else float("inf"),
            warm_start_bytes=warm_start.rounds * router.size * _FULL if warm_start.enabled else 0,
            familiar_bytes=2 * _FULL * shape.width * (shape.width + 3) if familiar_share(config) < 1 else 0,
        ),
        memory=predict_memory(shape, carried, own.down, config, tokens),
    )


def predict_memory(shape: ModelShape, layout: AdapterLayout, trained: int, config: Config, tokens: float) -> Memory:
    """``trained`` numbers of a client, examples of so many tokens."""
    training, element = config.training, 4 if config.backbone.dtype == "float32" else 2
    memory = shape.memory(layout, element)
    backbone = shape.backbone_bytes(config.backbone.weights, memory)
    if config.backbone.weights == "dense":
        backbone += memory.rounded(training.fp8)
    one = Step(1, training.batch_size * tokens, trained, mean=tokens)
    share = training.participation
    clients = max(1, round(share if share > 1 else share * config.data.clients))

    def parts(again: bool) -> dict[str, float]:
        return {"backbone": backbone, **memory.training(one.times(clients), again)}

    pace = Pace(shape.parameters, shape.config.num_hidden_layers)
    cards = [_card(gib, memory, backbone, one, clients, config, pace) for gib in CARDS]
    return Memory(clients, training.batch_size, tokens, parts(False), parts(True), cards)


def _card(
    gib: int, memory: StepMemory, backbone: float, one: Step, clients: int, config: Config, pace: Pace
) -> Card:
    free = gib * _GIB - CONTEXT - backbone
    kept, again = (min(clients, most_lanes(memory, one, USABLE * free, way)) for way in (False, True))
    if max(kept, again) == 0:
        return Card(gib, kept, again, "")
    fit = choose(memory, pace, one, clients, free, config.training)
    return Card(gib, kept, again, "again" if fit.checkpointing else "kept")
