"""Experts that close in mid-run: θ, φ, the kept signatures and all that is known of experts, in a smaller size."""

from collections.abc import Sequence
from dataclasses import replace

from fedweave.federation.engines.base import Engine
from fedweave.federation.state import ServerState
from fedweave.methods.lessons import shared_of

_BY_EXPERT = ("signed_buckets", "born", "openers", "idle")  # lists of the report


def without_experts(engine: Engine, state: ServerState, gone: Sequence[int]) -> ServerState:
    """The state without these experts; the others move up, to the bit as they were. Buckets of those that close
    have none, -1."""
    layout, router, signatures = state.layout, state.router, state.signatures
    assert router is not None and state.phi is not None
    kept = [m for m in range(layout.experts) if m not in gone]
    place = {m: i for i, m in enumerate(kept)}
    for member in engine.members:
        member.assignment = [place.get(m, -1) for m in member.assignment]
    narrow, experts = engine.layout(layout.rank, len(kept), layout.shared), layout.unstack(state.theta)
    theta = narrow.stack([experts[m] for m in kept], shared_of(state))
    router, phi = router.narrowed(state.phi[0], kept)
    known = {name: state.report[name] for name in _BY_EXPERT if name in state.report}
    report = state.report | {name: [had[m] for m in kept if m < len(had)] for name, had in known.items()}
    report["unfed"] = [place[m] for m in state.report.get("unfed", []) if m in place]
    doubts = {name: [had[m] for m in kept if m < len(had)] for name, had in state.bucket_doubts.items()}
    return replace(
        state, layout=narrow, theta=theta, router=router, phi=phi[None], report=report, bucket_doubts=doubts,
        signatures=None if signatures is None else signatures[kept],
    )  # fmt: skip
