"""`fedweave serve`: mistakes are one sentence, before the model loads where that is possible."""

import socket

import pytest

from fedweave.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-batch", "0"], "--max-batch must be at least 1"),
        (["--max-queue", "-1"], "--max-queue must not be negative"),
        (["--port", "70000"], "cannot listen on 127.0.0.1:70000"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--upstream", "localhost:8000"], "starts with http://"),
        (["--port", "0", "--max-new-tokens", "4000"], "use at most 384"),
        (["--port", "0", "--backbone", "nowhere/"], "backbone.model=nowhere/"),
        (["--port", "0", "--device", "tpu"], "device"),
    ],
)
def test_wrong_arguments(exported, capsys, arguments, message):
    assert main(["serve", str(exported), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_port_that_is_taken_and_a_folder_that_is_nothing(exported, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", str(exported), "--port", str(taken.getsockname()[1])]) == 2
        assert "already in use" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "no run folder" in capsys.readouterr().err
