"""`fedweave push` and `hf://` against a small server that speaks the hub's protocol for real."""

import base64
import hashlib
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedweave import load
from tests.helpers import command, read_json


class Hub(ThreadingHTTPServer):
    """Repositories, preupload, LFS and commits, as huggingface_hub calls them."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.created: list[dict] = []
        self.objects: dict[str, bytes] = {}  # large files by checksum
        self.files: dict[str, bytes] = {}  # what the commit made visible


class HubHandler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, body: object, status: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def content(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self):
        self.server.objects[self.path.rsplit("/", 1)[1]] = self.content()
        self.reply({})

    def do_POST(self):
        body = self.content()
        if self.headers.get("Authorization") != "Bearer right":
            return self.reply({"error": "who are you?"}, 401)
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self.reply({"url": f"{self.server.url}/me/model"})
        if self.path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if self.path == "/api/models/me/model/preupload/main":
            files = json.loads(body)["files"]
            large = [f["path"].endswith(".safetensors") for f in files]
            return self.reply({"files": [
                {"path": f["path"], "uploadMode": "lfs" if big else "regular", "shouldIgnore": False}
                for f, big in zip(files, large, strict=True)
            ]})  # fmt: skip
        if self.path == "/me/model.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            return self.reply({"transfer": "basic", "objects": [
                {**o, "authenticated": True,
                 "actions": {"upload": {"href": f"{self.server.url}/objects/{o['oid']}", "header": {}}}}
                for o in objects
            ]})  # fmt: skip
        if self.path.startswith("/api/models/me/model/commit/main"):
            for line in body.splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.objects[value["oid"]]
            return self.reply({"commitUrl": f"{self.server.url}/me/model/commit/1", "commitOid": "1" * 40,
                               "success": True})  # fmt: skip
        self.reply({"error": f"unexpected {self.path}"}, 404)

    def do_GET(self):
        """A repository's list of files, and the files."""
        files = self.server.files
        if self.path.startswith("/api/models/me/model/tree/"):
            return self.reply([
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ])  # fmt: skip
        if self.path.startswith("/api/models/me/model"):
            siblings = [{"rfilename": name} for name in files]
            return self.reply({"id": "me/model", "sha": "1" * 40, "siblings": siblings})
        content = files.get(self.path.partition("/resolve/")[2].partition("/")[2])
        if content is None:
            return self.reply({"error": f"unexpected {self.path}"}, 404)
        self.send_response(200)
        self.send_header("ETag", hashlib.sha256(content).hexdigest())
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()


def fedweave(*arguments, endpoint: str, token: str = "right", **extra: str) -> subprocess.CompletedProcess:
    """In its own process: the hub library reads its environment once."""
    environment = {
        **os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1",
        **extra,
    }  # fmt: skip
    return subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, timeout=600)


def test_a_bundle_arrives_whole_and_answers_from_there(bundle, hub, tmp_path):
    (bundle / "notes.txt").write_text("not part of the bundle")
    done = fedweave("push", bundle, "me/model", endpoint=hub.url)
    assert done.returncode == 0, done.stderr
    assert "/me/model" in done.stderr.splitlines()[-1]
    assert hub.created[0]["name"] == "model" and hub.created[0]["organization"] == "me"
    listed = read_json(bundle / "fedweave.json")["files"]
    assert set(hub.files) == {"fedweave.json", "README.md", *listed}
    for name, content in hub.files.items():
        assert content == (bundle / name).read_bytes(), name
    question = ["How many?", "--max-new-tokens", "6"]
    there = fedweave("generate", "hf://me/model", *question, endpoint=hub.url, HF_HOME=str(tmp_path / "cache"))
    assert there.returncode == 0, there.stderr
    assert there.stdout.strip() == load(bundle).generate(
        ["How many?"], max_new_tokens=6
    )[0].text  # fmt: skip


def test_what_goes_wrong_is_one_sentence(bundle, hub):
    refused = fedweave("push", bundle, "me/model", endpoint=hub.url, token="wrong")
    assert refused.returncode == 2 and "hf auth login" in refused.stderr
    away = fedweave("push", bundle, "me/model", endpoint="http://127.0.0.1:9")
    assert away.returncode == 2 and "cannot be reached" in away.stderr
    for done in (refused, away):
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert hub.files == {}


def test_nothing_is_sent_of_a_damaged_bundle_or_to_no_repository(bundle, complains):
    assert "owner/name" in complains("push", bundle, "model")
    assert "HF_HUB_OFFLINE" in complains("push", bundle, "me/model")  # as all tests run
    assert "hub cannot be reached" in complains("generate", "hf://me/model", "Hi")
    (bundle / "router.safetensors").unlink()
    assert "router.safetensors" in complains("push", bundle, "me/model")
