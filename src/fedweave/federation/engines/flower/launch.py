"""Starting Flower's own programs: a SuperNode beside a site's worker, and a run at a SuperLink."""

import ctypes
import datetime
import ipaddress
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.engines.flower.switches import quiet_environment
from fedweave.federation.engines.flower.tasks import Runtime
from fedweave.federation.site.settings import SiteConfig

_TURNED_AWAY = "[code: 2004]"  # SuperNode: the SuperLink does not know its key, or still counts on its last process
_LEASE = 75.0  # seconds; Flower counts on a SuperNode that was killed for 60
_APP = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedweave-app"
version = "1.0.0"
license = "Apache-2.0"
description = "A FedWeave federation; sites answer with their own installed fedweave"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "fedweave"

[tool.flwr.app.components]
serverapp = "fedweave_app:server"
clientapp = "fedweave.runs.client_app:app"
"""
_SERVER = '''"""The server of a FedWeave federation is the process that ran `fedweave federate`."""

from flwr.serverapp import ServerApp

server = ServerApp()


@server.main()
def main(grid, context):
    raise RuntimeError("start the SuperLink with --isolation process, so that `fedweave federate` is its ServerApp")
'''


def program(name: str) -> str:
    """One of Flower's programs, from the environment that this Python runs in."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise UserError("Flower is not installed here: pip install 'fedweave[flower]'.")
    return found


# -------------------------------------------------------------------------------------- a site


class SuperNode:
    """A Flower SuperNode as a child process: it speaks with the SuperLink and has no access to the site's data."""

    def __init__(self, site: SiteConfig, console: Console):
        self.site, self.console, self.failures = site, console, 0
        self.started, self.logged = 0.0, 0  # when this process began, and where in the log
        self.turned_away: float | None = None  # since when
        self.folder = Path(site.state)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = self.folder / "worker.secret"
        if not secret.exists():
            _write_private(secret, secrets.token_hex(32).encode())
        certificate = None if site.superlink.insecure else local_certificate(self.folder)
        self.runtime = Runtime(f"127.0.0.1:{site.superlink.port}", certificate, secret)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        link = self.site.superlink
        command = [
            program("flower-supernode"), "--superlink", link.address, "--isolation", "process",
            "--host", "127.0.0.1", "--port", str(link.port),
            "--superexec-auth-secret-file", str(self.runtime.secret),
        ]  # fmt: skip
        if link.insecure:
            return [*command, "--insecure"]
        return [
            *command, "--root-certificates", str(link.root_certificates),
            "--auth-supernode-private-key", str(link.private_key),
            "--ssl-ca-certfile", str(self.folder / "local.crt"), "--ssl-certfile", str(self.folder / "local.crt"),
            "--ssl-keyfile", str(self.folder / "local.key"),
        ]  # fmt: skip

    def start(self) -> None:
        self.started = time.monotonic()
        log = open(self.folder / "supernode.log", "ab")  # noqa: SIM115 - the child keeps it
        self.logged = log.tell()
        self.process = subprocess.Popen(
            self.command(),
            env=quiet_environment(FLWR_HOME=str(self.folder / "flwr")),
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )
        log.close()

    def check(self) -> None:
        """Start it again when it has ended. Only a SuperLink that keeps turning it away ends the site."""
        if self.process is None:
            self.start()
            return
        code = self.process.poll()
        if code is None:
            if time.monotonic() - self.started > 30:
                self.failures, self.turned_away = 0, None
            return
        said = (self.folder / "supernode.log").read_bytes()[self.logged :]
        if _TURNED_AWAY.encode() in said:
            self._wait_for_admission()
        else:
            self.failures += 1
            again = f"starting it again ({self.folder / 'supernode.log'})"
            self.console.warn(f"the SuperNode ended with {code}; {again}.")
            time.sleep(min(30.0, 2.0**self.failures))
        self.start()

    def _wait_for_admission(self) -> None:
        """Flower says the same of a key that it does not know and of one whose last SuperNode was just killed."""
        link, now = self.site.superlink, time.monotonic()
        if self.turned_away is None:
            self.turned_away = now
            self.console.warn(
                f"the SuperLink at {link.address} does not let this site in: its key is not registered, or another "
                f"SuperNode had it less than a minute ago. Trying again for {_LEASE:.0f} s."
            )
        elif now - self.turned_away > _LEASE:
            raise UserError(
                f"the SuperLink at {link.address} turned this site away: its key is not registered, or in use by "
                f"another SuperNode. Send {link.private_key}.pub to the operator."
            )
        time.sleep(5.0)

    def renew(self) -> None:
        """A fresh SuperNode. One that outlives a run which ended in the middle of a question may keep an answer
        that nobody waits for, and is one answer behind from then on."""
        self.stop()
        self.start()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()


def _die_with_parent() -> None:
    """In the child: a worker that is killed takes its SuperNode along (Linux)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    except (OSError, AttributeError):
        return


def local_certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1, made here and trusted here: SuperNode and worker speak TLS too."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    path = folder / "local.crt"
    if path.exists():
        return path
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedweave worker")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([address, x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA384())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    _write_private(folder / "local.key", pem)
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


def _write_private(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(content)


# -------------------------------------------------------------------------------------- the server


def submit(runtime: Runtime) -> int:
    """Tell the SuperLink of a new run; returns its number. The app that goes with it does nothing: sites answer
    with the fedweave that is installed there."""
    with tempfile.TemporaryDirectory(prefix="fedweave-") as folder:
        app, home = Path(folder) / "fedweave-app", Path(folder) / "home"
        (app / "fedweave_app").mkdir(parents=True)
        home.mkdir()
        (app / "pyproject.toml").write_text(_APP)
        (app / "fedweave_app" / "__init__.py").write_text(_SERVER)
        root = runtime.root_certificates
        trust = f'root-certificates = "{root.resolve()}"' if root else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{runtime.address}"\n{trust}\n'
        )
        command = [program("flwr"), "run", str(app), "here", "--format", "json"]
        done = subprocess.run(command, env=quiet_environment(FLWR_HOME=str(home)), capture_output=True, text=True)
    answer = done.stdout if done.stdout.strip() else done.stderr
    try:
        return int(json.loads(answer)["run-id"])
    except (ValueError, KeyError):
        raise UserError(
            f"the SuperLink at {runtime.address} took no run: {' '.join(answer.split())[:300] or 'no answer'}."
        ) from None
