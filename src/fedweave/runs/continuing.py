"""``init=BUNDLE``: the experts and the router of a bundle as the first state of a new federation."""

from pathlib import Path

from fedweave.alignment.kept import require_comparable
from fedweave.backbone.load import Backbone
from fedweave.backbone.targets import spelled_out
from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.federation.state import ServerState
from fedweave.router.routed import RoutedExperts


def initial_state(config: Config, backbone: Backbone) -> RoutedExperts | None:
    """The bundle's state, once method, backbone and shapes are those of the config; None without a bundle."""
    from fedweave.bundle.load import read_experts, read_kept, verify_bundle

    if config.init is None:
        return None
    folder = Path(str(config.init)).expanduser()
    description = verify_bundle(folder)
    rank = "experts.single_rank" if description["router"] is None else "experts.rank"
    experts = config.experts
    layers = backbone.linear_layers(experts.target_modules)
    wanted = {
        "method": (config.method, description["method"]),
        rank: (experts.single_rank if description["router"] is None else experts.rank, description["rank"]),
        "experts.shared_rank": (experts.shared_rank if description["router"] else 0, description.get("shared", 0)),
        "experts.alpha": (experts.alpha, description["alpha"]),
        "experts.span": (experts.span, description.get("span", "all")),
        "experts.target_modules": (
            sorted(spelled_out(experts.target_modules, layers)),
            sorted(description["target_modules"]),
        ),
    }
    for key, (asked, found) in wanted.items():
        if asked != found:
            value = f"[{','.join(found)}]" if isinstance(found, list) else f"{found}"
            raise UserError(f"init={config.init} does not fit {key}={asked}; set {key}={value}, as in the bundle.")
    found = read_experts(folder, description, backbone, layers)
    if config.living.notice == "off":
        return found
    kept = require_comparable(read_kept(folder, description), config)
    report = {
        "own_distances": kept.own, "halfway": kept.halfway, "signed_buckets": kept.buckets,
        "born": [0] * found.layout.experts,
    }  # fmt: skip
    return ServerState(**vars(found), signatures=kept.means.to(found.theta), report=report)
