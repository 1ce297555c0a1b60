"""What runs, bundles and comparisons write, file by file: the types that writers and readers share. Plain JSON.

config.yaml is :class:`fedweave.config.Config`; what is in ``checkpoints/`` is said in ``runs/snapshot.py``.
"""

from collections.abc import Mapping
from typing import Literal, TypedDict

from typing_extensions import NotRequired

ByTask = dict[str, float]  # task -> figure; "macro" is the unweighted mean over tasks
ConfigTree = dict[str, object]  # a Config as nested dictionaries


class DataFingerprint(TypedDict):
    """Hashes of what a run trains and tests on: prompts, answers and whose they are."""

    clients: str
    validation: str
    test: str
    unseen: str
    labels: str  # which only audit; upper bounds are told them


class Manifest(TypedDict):
    """manifest.json: where a run's data came from. Of a run over sites, whose data nobody lists, its name alone."""

    source: str
    seed: int
    notes: NotRequired[list[str]]
    tasks: NotRequired[dict[str, str]]  # task -> title
    clients: NotRequired[dict[str, list[str]]]  # client -> origin of every row
    validation: NotRequired[list[str]]
    test: NotRequired[list[str]]
    unseen: NotRequired[list[str]]
    fingerprint: NotRequired[DataFingerprint]
    unseen_tasks: NotRequired[dict[str, str]]  # task -> title
    federation: NotRequired[str]  # by which its sites know it


# -------------------------------------------------------------------------------------- discovery.json


class Agreement(TypedDict):
    purity: float
    nmi: float
    ari: float  # of clusters with labels


Audit = TypedDict("Audit", {"local": Agreement, "global": Agreement})  # of buckets, of experts


class Traffic(TypedDict):
    up: int
    down: int  # bytes


class ClientBuckets(TypedDict):
    examples: int
    buckets: list[int]  # their sizes
    experts: list[int]  # the expert of each; -1: a latecomer's bucket that fits none
    note: str


class AlignmentReport(TypedDict):
    """What a method tells of its preparation; one with a single adapter has little to tell."""

    experts: int
    client_samples: NotRequired[list[int]]
    bucket_silhouettes: NotRequired[dict[str, dict[str, float]]]  # client -> k -> silhouette
    prototypes: NotRequired[int]
    prototype_labels: NotRequired[list[int]]  # the expert of every bucket
    router_examples: NotRequired[list[int]]  # experts.labels=router: examples of every expert
    dropped_experts: NotRequired[list[int]]  # of alignment's: they have too few examples
    left_out: NotRequired[list[str]]  # rule=agreement: clients that counted nothing at the end of the warm start
    alignment_silhouettes: NotRequired[dict[str, float]]  # M -> silhouette
    alignment_note: NotRequired[str]
    signature_distance: NotRequired[list[list[float]] | None]  # None: too many buckets to read
    preparation_bytes: NotRequired[dict[str, Traffic]]
    join_distance: NotRequired[float]
    own_distances: NotRequired[list[float]]  # of every bucket to the others of its expert, ascending
    halfway: NotRequired[float]  # from an expert's own buckets to the next expert's; 0 with one expert
    signed_buckets: NotRequired[list[int]]  # behind the mean signature of every expert
    born: NotRequired[list[int]]  # the round before which every expert opened; 0: at alignment
    openers: NotRequired[list[str]]  # the client that opened an expert alone; empty: several, or alignment
    idle: NotRequired[list[int]]  # rounds since somebody fed every expert
    asked: NotRequired[dict[str, list[int]]]  # client -> sizes of its buckets that the operator was asked about
    waiting: NotRequired[dict[str, list[int]]]  # the same, of those that it may not open experts for alone


class LabelRecord(TypedDict):
    """What only labels can tell."""

    bucket_tasks: NotRequired[dict[str, list[dict[str, int]]]]  # client -> of every bucket: task -> examples
    audit: NotRequired[Audit]  # against tasks
    kind_audit: NotRequired[Audit]  # against kinds, where several tasks are one


class Discovery(AlignmentReport, LabelRecord):
    """discovery.json: how buckets became experts."""

    clients: dict[str, ClientBuckets]


class PromptMap(TypedDict):
    """embedding.json: a sample of the training prompts on their principal axes."""

    explained: list[float]
    points: list[list[float]]  # [n, axes]
    clients: list[str]
    buckets: list[int]
    experts: list[int]
    tasks: list[str]


# -------------------------------------------------------------------------------------- progress.json


class Phase(TypedDict, total=False):
    label: str
    done: int
    total: int  # empty before the first one


class LiveState(TypedDict):
    """progress.json: where a run stands right now."""

    state: Literal["running", "finished", "stopped"]
    pid: int
    host: str
    updated: float  # seconds since 1970
    phase: Phase
    rounds: int
    round_seconds: list[float]


# -------------------------------------------------------------------------------------- summary.json


class RoutingCost(TypedDict):
    score: ByTask
    ms_per_prompt: float


class Untouched(TypedDict):
    loss: ByTask
    unseen: NotRequired[ByTask]  # loss


class Chosen(TypedDict):
    best_round: int
    best_loss: float


class Parameters(TypedDict):
    experts: int
    router: int


class BackboneName(TypedDict):
    model: str
    fingerprint: str


class ClientFigures(TypedDict):
    """The test as one client sees it: on rows kept back from its own, or on its mixture of the common tasks."""

    loss: float
    score: NotRequired[float]


class Tested(TypedDict):
    """The test of one state."""

    used: str  # the routing that the scores are of
    loss: dict[str, ByTask]  # by routing
    routing: dict[str, list[float]]  # task -> mean router weight of every expert
    top1: dict[str, list[float]]  # task -> share of prompts that each expert answers
    decided: NotRequired[dict[str, float]]  # kind -> share of prompts that one of several experts answers
    score: NotRequired[ByTask]
    routings: NotRequired[dict[str, RoutingCost]]
    clients: NotRequired[dict[str, ClientFigures]]
    round: NotRequired[int]


class Test(TypedDict):
    """Empty where the server of a federation has no test set."""

    untouched: NotRequired[Untouched]
    best: NotRequired[Tested]
    last: NotRequired[Tested]
    unseen: NotRequired[Tested]  # the best round on tasks that nobody trained on, where there are any


class AnatomyRecord(TypedDict):
    """model.json of a run over sites: the backbone that all of them have."""

    fingerprint: str
    identity: dict[str, str]
    width: int
    layers: dict[str, list[int]]  # name -> inputs, outputs


class Life(TypedDict):
    """What a run saw that changed in mid-run: kinds that came, experts that opened, validation losses by round."""

    came: dict[str, int]  # new kind -> the round before which it came
    opened: list[int]  # the rounds before which experts opened
    born: list[int]  # the same of every expert that is there in the end; 0: at alignment
    new: dict[str, dict[str, float]]  # new kind -> round -> loss
    old: dict[str, float]  # round -> mean loss of the kinds that were there and stayed


class PrivacyFigures(TypedDict):
    """A run's differential privacy."""

    level: str  # client or example
    epsilon: float  # what it was solved for
    delta: float
    clip: float
    noise: list[float]  # least and most over clients, in rounds, as multiples of the clip
    spent: float  # ε of the client that has spent most


class Communication(TypedDict):
    """Bytes between clients and server, before round 1 and in all rounds."""

    before_up: int
    before_down: int
    rounds_up: int
    rounds_down: int
    per_client_and_round_up: int
    per_client_and_round_down: int
    changes_up: NotRequired[int]  # between rounds, where data changed
    changes_down: NotRequired[int]


class Environment(TypedDict):
    versions: dict[str, str]
    device: str
    commit: str | None


class Timing(TypedDict):
    until_last_round_s: float
    total_s: float
    phases_s: dict[str, float]  # of the last session
    peak_memory_bytes: int | None


class Summary(TypedDict):
    """summary.json: a run at its end."""

    schema: int
    method: str
    seed: int
    tasks: dict[str, str]  # task -> title
    unseen_tasks: NotRequired[dict[str, str]]
    notes: list[str]
    clients: int
    examples: int
    train_tokens: int | None  # of one pass over all examples; None: at the sites
    buckets: int
    experts: int
    parameters: Parameters
    trained_parameters: int
    rounds: int
    ended_early: NotRequired[bool]  # True where training.patience ran out for good
    communication: Communication
    privacy: NotRequired[PrivacyFigures]
    validation: Chosen
    audit: Audit | None
    kind_audit: NotRequired[Audit]
    test: Test
    backbone: BackboneName
    config: ConfigTree
    environment: Environment
    timing: NotRequired[Timing]  # added when all else is there
    life: NotRequired[Life]  # added by a comparison, where data.changes


class Prediction(TypedDict):
    """A line of predictions.jsonl."""

    task: str
    origin: str
    prompt: str | list[dict[str, str]]  # a text, or a chat's messages
    reference: str
    loss: float
    expert: int  # the router's first choice; -1: none, the prompt is strange to it
    weights: list[float]  # of the router
    prediction: NotRequired[str]  # with its score, where answers were generated
    score: NotRequired[float]


# -------------------------------------------------------------------------------------- beyond one run


class ComparedCell(TypedDict):
    """One of results.json, which a comparison writes."""

    values: dict[str, object]  # axis -> value
    folder: str | None  # of the run, from the comparison's; None: all that is left is a record
    summary: Mapping[str, object]  # a Summary, or what the record has of it


class RouterShape(TypedDict):
    """A RouterLayout."""

    width: int
    hidden: int
    experts: int
    scale: str
    sure: NotRequired[bool]
    axes: NotRequired[int]


class KeptFacts(TypedDict):
    """A KeptSignatures without its tensor."""

    own: list[float]
    halfway: float
    buckets: list[int]
    made: dict[str, float]


class Description(TypedDict):
    """fedweave.json of a bundle: what loading needs and the tensors do not say."""

    schema: int
    method: str
    round: int
    seed: int
    backbone: dict[str, object]  # a BackboneConfig
    base_model: NotRequired[str]  # what others call the backbone, never a path of this machine
    fingerprint: str
    experts: int
    rank: int
    shared: NotRequired[int]  # rank of what all experts share; bundles of earlier versions have none
    span: NotRequired[Literal["all", "answer"]]  # tokens that experts see
    alpha: float
    target_modules: list[str]
    router: RouterShape | None
    shares: list[float]  # how much each router counts
    feature: str
    kept: NotRequired[KeptFacts]  # beside signatures.safetensors, where the run has kept signatures
    files: dict[str, str]  # name -> SHA-256; empty until all files are there
