"""What `fedweave diagnose` writes, diagnostics.json: the types that its measures, its words and reports share."""

from typing import Literal, TypedDict

from typing_extensions import NotRequired

Number = float | None  # None where it is not finite


class DiagnosisSample(TypedDict):
    clients: list[str]
    of_clients: int
    batches: int
    batch_size: int


class UnitConflict(TypedDict):
    gamma: float
    cancelled: float


class BucketConflict(UnitConflict):
    off_dominant: float
    bound: float


class ConflictFigures(TypedDict):
    norms: list[float]  # of every pattern's gradient
    cosines: list[list[float]]
    clients: dict[str, UnitConflict]
    buckets: dict[str, list[BucketConflict]]
    client_cancelled: float
    bucket_cancelled: float
    bound_holds: bool


class ContaminationFigures(TypedDict):
    """One kept state; [M] each, None for an expert without routed weight."""

    chi: list[Number]
    local: list[Number]
    misalignment: list[Number]
    leakage: list[Number]
    client: list[Number]
    lemma_holds: bool


class ContaminationReport(TypedDict):
    clean: bool  # as many patterns as experts
    target: list[str]  # the pattern of every expert
    oracle: dict[str, int]  # the expert of every pattern
    client_mixture: list[Number]
    rounds: dict[str, ContaminationFigures]


class BudgetReport(TypedDict):
    rate: float
    steps: int
    budget: list[float]
    mean_weight: list[float]
    weight_by_round: dict[str, list[float]]


class PathFigures(TypedDict):
    """Both ways of training one client's router, step by step."""

    rate: float
    heterogeneity: float
    order_bias: list[float]
    net_order_bias: float
    dispersion: list[float]
    consensus_error: list[float]
    smoothness: float
    gradient_norm: float
    loss_start: float
    loss_persistent: float
    loss_reset: float
    order_term: float
    consensus_term: float
    first_step_ratio: float
    consensus_bound_holds: bool
    pl_most: Number


class ClientPaths(PathFigures):
    weight_mismatch: float
    weight_mismatch_bias: float
    weight_mismatch_bound: float
    weight_mismatch_bound_holds: bool
    largest_gradient: float


class PathsReport(TypedDict):
    steps: int
    rate: float
    clients: dict[str, ClientPaths]


class SparseRiskFigures(TypedDict):
    deficit: float
    margin_risk: float
    mismatch: float
    soft: float
    sparse: float
    oracle: float
    worst: float
    gap: float
    mix: float
    examples: int
    excess: float
    approximation_most: float
    margin_bound: float
    bound: Number
    calibrated: bool
    chain_holds: bool


class ClientRisk(TypedDict):
    deficit: float
    margin_risk: float
    sparse: NotRequired[SparseRiskFigures]  # of the clients in the sample


class RiskReport(TypedDict):
    clean: bool
    deficit: float
    margin_risk: float
    clients: dict[str, ClientRisk]


Level = Literal["good", "note", "warning"]


class Verdict(TypedDict):
    about: str  # a section
    level: Level
    text: str


class Diagnosis(TypedDict):
    """The paper's theory on a run; ``refused`` says why a section is not there."""

    schema: int
    method: str
    round: int
    rounds: int
    patterns: list[str]
    experts: int
    sample: DiagnosisSample
    conflict: NotRequired[dict[str, ConflictFigures]]
    contamination: NotRequired[ContaminationReport]
    effective_budget: NotRequired[BudgetReport]
    router_paths: NotRequired[PathsReport]
    routing_risk: NotRequired[RiskReport]
    refused: dict[str, str]
    seconds: float
    verdicts: list[Verdict]


def sources(figures: ContaminationFigures) -> dict[str, list[Number]]:
    """The three parts that bound χ, by name; [M] each."""
    return {
        "impure buckets": figures["local"],
        "misaligned buckets": figures["misalignment"],
        "leaking routes": figures["leakage"],
    }
