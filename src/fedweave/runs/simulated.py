"""``engine=flower`` without a deployment: the clients are Flower's simulated nodes, in Ray's processes."""

import logging
import os
from typing import Any

from fedweave.console import Console
from fedweave.errors import UserError, needed
from fedweave.federation.engines.flower.switches import OUTBOUND_OFF
from fedweave.methods import build_method
from fedweave.runs.folder import RunFolder
from fedweave.runs.workspace import Prepared
from fedweave.schema import Summary


def simulate(run: RunFolder, prepared: Prepared, console: Console) -> Summary:
    """The run over as many simulated nodes as there are clients; tested here, where the test set is."""
    for name, value in OUTBOUND_OFF.items():
        os.environ.setdefault(name, value)
    for package in ("flwr", "ray"):
        needed(package, "engine=flower needs Flower and Ray: pip install 'fedweave[simulation]'.")
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from fedweave.runs.client_app import app as client_app
    from fedweave.runs.federated import federate_over

    method = build_method(prepared.config)
    if method.gathers:
        raise UserError(f"method={prepared.config.method} has no clients to reach; use engine=in-process.")
    workspace = prepared.build(console)
    workspace.disclose(method)
    nodes = len(prepared.data.clients)
    outcome: list[Summary | Exception] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            outcome.append(federate_over(grid, run, prepared.config, console, workspace))
        except Exception as error:  # Flower would end the process; the caller decides
            outcome.append(error)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    gpus = 1.0 if workspace.backbone.device.type == "cuda" else 0.0
    resources: Any = {"num_cpus": max(1, (os.cpu_count() or 1) // 2), "num_gpus": gpus}
    run_simulation(server_app, client_app, nodes, backend_config={"client_resources": resources})
    if not outcome:
        raise UserError("the simulation ended without a result; see Flower's lines above.")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
