"""A run over sites that is started or resumed with settings that cannot be: nothing is written."""

import re
import shlex
from pathlib import Path

import pytest

from fedweave.cli import main
from fedweave.config import load_config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.engines.flower.tasks import Runtime
from fedweave.runs.federated import resume, start
from fedweave.runs.folder import RunFolder
from fedweave.runs.snapshot import Snapshot, config_hash

SITES = ["data.source=sites", "data.path=null", "engine=flower", "federation.sites=2"]


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [("living.notice=open", "kept no signatures"), ("federation.test=nowhere.jsonl", "nowhere.jsonl")],
)
def test_a_resume_that_cannot_be_writes_nothing(tmp_path, monkeypatch, asked, reason):
    """The federation began with living.notice=off, and ended after round 2."""
    config = load_config("quickstart", SITES)
    run = RunFolder.create(tmp_path / "run", config, {"source": "sites", "seed": 42, "federation": "x"})
    checkpoint = Snapshot({}, {"settings": config_hash(config), "completed": 2}, run.path)
    monkeypatch.setattr(RunFolder, "newest", lambda *_: checkpoint)
    (run.path / "metrics.jsonl").write_text("{}\n")
    before = files_of(run.path)
    with pytest.raises(UserError, match=reason):
        resume(run.path, [asked], Runtime("127.0.0.1:1"), Console(quiet=True))
    assert files_of(run.path) == before


def test_a_start_that_cannot_be_writes_nothing(tmp_path):
    config = load_config("quickstart", [*SITES, "federation.test=nowhere.jsonl"])
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        start(config, tmp_path / "run", Runtime("127.0.0.1:1"), Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_an_interrupted_server_prints_all_that_has_to_be_typed(tmp_path, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedweave.runs.federated.submit", interrupted)
    certificate, secret = tmp_path / "the ca.crt", tmp_path / "federate.secret"
    certificate.touch()
    secret.touch()
    link = ["--superlink", "hub:8000", "--root-certificates", str(certificate), "--secret", str(secret)]
    assert main(["federate", "quickstart", "federation.sites=2", f"output={tmp_path / 'run'}", *link]) == 130
    for _ in range(2):  # what is printed is taken, and prints itself again
        (typed,) = re.findall("`(.*)` goes on", capsys.readouterr().err)
        words = shlex.split(typed)
        assert words == ["fedweave", "federate", "--resume", str(tmp_path / "run"), *link]
        assert main(words[1:]) == 130
