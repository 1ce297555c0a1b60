"""A real federation on loopback: the example scripts, a SuperLink with TLS and node keys, sites as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from fedweave.data.sample import make_sample
from tests.helpers import command, free_port, wait_for, write_jsonl

SCRIPTS = Path(__file__).parents[3] / "examples" / "deployment"
SITES = ("north", "south", "west")
SMALL = [
    "experts.rank=4", "experts.dropout=0.1", "discovery.max_buckets=4", "discovery.warmup_steps=2",
    "discovery.restarts=2", "training.local_steps=3", "training.batch_size=4", "router.hidden=16",
    "router.warm_start.enabled=false", "evaluation.max_new_tokens=4", "evaluation.scores=false",
    "backbone.device=cpu", "backbone.max_length=128", "alignment.max_experts=3",
]  # fmt: skip


class Deployment:
    """Processes of one federation; ``stop`` ends every one that it started."""

    def __init__(self, folder: Path, model: Path, sites: tuple[str, ...] = SITES):
        self.folder, self.model, self.port = folder, model, free_port()
        self.sites, self.keys = sites, folder / "keys"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        subprocess.run([SCRIPTS / "make-certificates.sh", self.keys, "127.0.0.1", *sites], check=True)
        pools, _ = make_sample(max(40, 9 * len(sites) + 4), 7)  # 36 rows a site, four kinds
        rows = [
            {"prompt": e.prompt, "response": e.response}
            for group in zip(*pools.values(), strict=True)
            for e in group
        ]
        self.data = folder / "data"
        self.data.mkdir()
        for i, site in enumerate(sites):
            write_jsonl(self.data / f"{site}.jsonl", rows[i * 36 : (i + 1) * 36])
            self.describe(site, self.data / f"{site}.jsonl")
        write_jsonl(self.data / "test.jsonl", rows[-10:])

    def describe(self, site: str, data: Path, name: str | None = None, port: int | None = None) -> Path:
        path = self.keys / site / "site.yaml"
        path.write_text(yaml.safe_dump({
            "name": name or site, "data": str(data), "backbone": {"model": str(self.model), "device": "cpu"},
            "superlink": {
                "address": f"127.0.0.1:{port or self.port}", "port": free_port(),
                "root_certificates": "ca.crt", "private_key": "site.key",
            },
        }))  # fmt: skip
        return path

    # ---------------------------------------------------------------------------------- processes

    def spawn(self, name: str, *program: object) -> subprocess.Popen:
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        process = subprocess.Popen(
            [str(part) for part in program], env=self.environment, stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def superlink(self) -> None:
        self.spawn("superlink", SCRIPTS / "superlink.sh", self.keys / "server", "127.0.0.1", self.port)
        wait_for(lambda: "Uvicorn running" in self.log("superlink"), "the SuperLink's start")

    def proxy(self) -> int:
        """The port that nginx opens before the SuperLink."""
        port = free_port()
        self.spawn("proxy", SCRIPTS / "proxy.sh", self.keys / "server", port, self.port)
        wait_for(lambda: (self.keys / "server" / "proxy" / "nginx.pid").exists(), "the proxy's start")
        return port

    def register(self, *sites: str, port: int | None = None) -> None:
        address = f"127.0.0.1:{port or self.port}"
        program: list[str | Path] = [SCRIPTS / "register.sh", self.keys / "server", address, *sites]
        subprocess.run(program, env=self.environment, check=True, capture_output=True)

    def start(self, *sites: str) -> None:
        """The SuperLink, every key registered, and these sites."""
        self.superlink()
        self.register()
        for name in sites:
            self.site(name)

    def site(self, name: str) -> subprocess.Popen:
        return self.spawn(name, *command("site", "start", self.keys / name / "site.yaml"))

    def stammering_site(self, name: str) -> subprocess.Popen:
        """A site that sends every answer twice."""
        twice = (
            "import sys; from fedweave.federation.engines.flower import tasks; from fedweave.cli import main; "
            "once = tasks.push_message; "
            "tasks.push_message = lambda *a: (once(*a), once(*a)); "
            "sys.exit(main(sys.argv[1:]))"
        )
        return self.spawn(name, sys.executable, "-c", twice, "site", "start", self.keys / name / "site.yaml")

    def federate(self, name: str, *arguments: object) -> subprocess.Popen:
        server = self.keys / "server"
        access = ["--root-certificates", server / "ca.crt", "--secret", server / "federate.secret"]
        return self.spawn(name, *command("federate", *arguments, "--superlink", f"127.0.0.1:{self.port}", *access))

    def finish(self, process: subprocess.Popen, name: str, seconds: float) -> None:
        assert process.wait(seconds) == 0, self.log(name)

    def kill(self, name: str) -> None:
        """kill -9, with everything that it started."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def leave(self, name: str) -> None:
        """As its operator would stop it: Flower forgets it at once, not after a minute."""
        process = self.processes.pop(name)
        process.terminate()
        process.wait(60)

    def pause(self, name: str) -> None:
        """It and everything that it started stand still, as in a machine that sleeps."""
        os.killpg(self.processes[name].pid, signal.SIGSTOP)

    def wake(self, name: str) -> None:
        os.killpg(self.processes[name].pid, signal.SIGCONT)

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
