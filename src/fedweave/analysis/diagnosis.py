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


class ContaminationParts(TypedDict):
    """χ_m and its parts; [M] each, None for an expert without routed weight."""

    chi: list[Number]
    local: list[Number]  # impurity: not the bucket's dominant pattern
    misalignment: list[Number]  # the bucket's dominant pattern is not its own expert's target
    leakage: list[Number]  # routed to m from a bucket of another expert
    lemma_holds: bool  # χ_m ≤ local + misalignment + leakage


class ContaminationFigures(ContaminationParts):
    """One kept state."""

    client: list[Number]  # χ_m if whole clients were averaged


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
    """Both ways of training one client's router, step by step; norms are squared."""

    rate: float  # η
    heterogeneity: float  # ζ² = Σ π_c ‖g_c − g‖² at the common start
    order_bias: list[float]  # ‖q_s‖², s = 0 … S−1
    net_order_bias: float  # ‖mean of q_s‖²: what does not cancel over the schedule
    dispersion: list[float]  # D_s, s = 0 … S
    consensus_error: list[float]  # ‖e_s‖², s = 0 … S−1
    smoothness: float  # the largest ‖g_c(φ) − g_c(φ̄)‖ / ‖φ − φ̄‖ met: L_R as far as it was seen
    gradient_norm: float  # ‖g‖ at the start
    loss_start: float
    loss_persistent: float  # R(φ_S)
    loss_reset: float  # R(φ̄_S)
    order_term: float  # O = η/2 Σ_s ‖q_s‖²
    consensus_term: float  # C, the same sum over ‖e_s‖²
    first_step_ratio: float
    consensus_bound_holds: bool
    pl_most: Number


class MismatchFigures(TypedDict):
    weight_mismatch: float  # ‖π̃ − π‖₁
    weight_mismatch_bias: float  # ‖b_wt‖ = ‖Σ_c (π̃_c − π_c) g_c‖
    weight_mismatch_bound: float  # G_R ‖π̃ − π‖₁
    weight_mismatch_bound_holds: bool
    largest_gradient: float  # G_R = max_c ‖g_c‖


class ClientPaths(PathFigures, MismatchFigures):
    """One client."""


class PathsReport(TypedDict):
    steps: int
    rate: float
    clients: dict[str, ClientPaths]


class SparseRiskFigures(TypedDict):
    """Every term of the sparse-risk bound on one client's examples."""

    deficit: float  # S
    margin_risk: float  # R_0
    mismatch: float  # Pr[m̂ ≠ m†]
    soft: float  # R: loss of the soft mixture
    sparse: float  # R_sparse: loss of m̂
    oracle: float  # R_oracle: loss of m†
    worst: float  # Δ_max: the most that any wrong expert costs on any example
    gap: float  # c_gap: what the best wrong expert costs on average; ≤ 0: experts are not told apart
    mix: float  # β_mix: the least that makes c_gap S ≤ R − R_oracle + β_mix true here
    examples: int
    excess: float  # R_sparse − R_oracle
    approximation_most: float  # [R − R_oracle]₊, at least A = [R* − R_oracle]₊: the best router's R* is at most R
    margin_bound: float  # Δ_max R_0
    bound: Number  # 2 Δ_max / c_gap · (R − R_oracle + β_mix), the last line of the chain; None without calibration
    calibrated: bool
    chain_holds: bool  # excess ≤ Δ_max R_0 ≤ 2 Δ_max / c_gap (R − R_oracle + β_mix)


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
