"""A run over real sites: this process is the ServerApp, the run folder is an ordinary one."""

from pathlib import Path

from fedweave.config import Config, dump_config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.engines.flower.tasks import Runtime
from fedweave.files import write_atomic
from fedweave.methods import build_method
from fedweave.runs.folder import RunFolder, require_new
from fedweave.schema import Summary

OUTAGE = 30.0  # seconds for which a SuperLink may be away without ending the run


def start(config: Config, output: Path, runtime: Runtime, console: Console) -> Summary:
    """A new federation, once ``federation.sites`` sites are there."""
    from fedweave.runs.federated import new_manifest

    if config.federation.sites < 1:
        raise UserError("say how many sites must be there before alignment, as in federation.sites=3.")
    method = build_method(config)
    if method.uses_labels or method.gathers:
        what = "is told every example's kind" if method.uses_labels else "has everybody's data"
        raise UserError(f"method={config.method} {what}: it runs in simulations only.")
    require_new(output)
    _check_files(runtime)
    run = RunFolder.create(output, config, new_manifest(config))
    with run.session(config):
        return _execute(run, config, runtime, console)


def resume(
    path: Path, overrides: list[str], runtime: Runtime, console: Console, checkpoint: int | None = None
) -> Summary:
    """Continue a federation from the server's newest checkpoint, or from the one of a round that is named; its
    sites know it by the manifest's name."""
    run, config = RunFolder.open(path, overrides)
    if config.data.source != "sites":
        raise UserError(f"{path} is no run over sites; continue it with `fedweave resume {path}`.")
    _check_files(runtime)
    with run.session(config):
        if (snapshot := run.newest(checkpoint)) is not None:
            run.go_back(snapshot.meta["completed"])
        if overrides:
            write_atomic(path / "config.yaml", dump_config(config))
        return _execute(run, config, runtime, console)


def _execute(run: RunFolder, config: Config, runtime: Runtime, console: Console) -> Summary:
    import httpx
    from flwr.supercore.run import RunNotRunningException

    from fedweave.federation.engines.flower.launch import submit
    from fedweave.federation.engines.flower.switches import hush
    from fedweave.federation.engines.flower.tasks import server_task
    from fedweave.runs.federated import federate_over, load_test

    hush()
    tester = load_test(config, console)
    federation = run.manifest()["federation"]
    console.say(f"run folder: {run.path}")
    try:
        with server_task(runtime, submit(runtime), OUTAGE) as grid:
            return federate_over(grid, run, config, console, federation, config.federation.sites, tester)
    except (httpx.HTTPError, RunNotRunningException) as error:
        raise UserError(
            f"the SuperLink at {runtime.address} is gone ({error or type(error).__name__}); start it again, then "
            f"`fedweave federate --resume {run.path}` goes on from the last checkpoint."
        ) from error


def _check_files(runtime: Runtime) -> None:
    for path in (runtime.root_certificates, runtime.secret):
        if path is not None and not path.is_file():
            raise UserError(f"there is no file {path}; examples/deployment/make-certificates.sh makes it.")
