"""`fedweave serve`: mistakes are one sentence, before the model loads where that is possible."""

import socket

import pytest

from fedweave.errors import UserError
from fedweave.serving.jobs import Limits
from fedweave.serving.server import fitting


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
def test_wrong_arguments(exported, complains, arguments, message):
    assert message in complains("serve", exported, *arguments)


def test_a_model_of_few_tokens_is_served_with_shorter_answers_unless_they_were_asked_for(backbone):
    assert fitting(Limits(1, 1, 512, 1000, yields=True), backbone).max_new_tokens == 384
    with pytest.raises(UserError, match="use at most 384"):
        fitting(Limits(1, 1, 512, 1000), backbone)


def test_a_port_that_is_taken_and_a_folder_that_is_nothing(exported, tmp_path, complains):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "already in use" in complains("serve", exported, "--port", taken.getsockname()[1])
    assert "no run folder" in complains("serve", tmp_path, "--port", "0")
