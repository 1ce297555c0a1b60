"""Cost accounting (paper, Table 5 and Appendix B) from shapes alone: parameters, bytes, steps, memory.

What a method trains and sends is its own ``payload``; here it meets a model's shape and a config.
"""

from dataclasses import asdict, dataclass

from fedweave.analysis.cards import Memory, predict_memory
from fedweave.analysis.shapes import ModelShape
from fedweave.config import Config
from fedweave.discovery.signatures import Signatures
from fedweave.errors import UserError, nearest
from fedweave.federation.method import Payload, Sizes
from fedweave.methods import METHODS, method_class
from fedweave.methods.familiar import familiar_share
from fedweave.router.mlp import RouterLayout

# Bytes of one number in an update; int8 has one float32 scale for every 256 numbers.
PRECISIONS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256}
_FULL = 4  # warmup adapters and what the server broadcasts travel in float32


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
    sizes = Sizes(single, stacked, router, served, config.router.training == "soft")
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
