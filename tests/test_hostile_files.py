"""Model files and bundles that somebody wrote to do harm, checksums and all: each is refused in one sentence, or
loads with finite weights; none makes room for what it only announces.

Each case follows from its number, so that a failure can be had again; FEDWEAVE_DAMAGES=1000 tries more of them.
"""

import json
import os
import random
import resource
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedweave
from fedweave.backbone import gguf as conversion
from fedweave.backbone.announced import stored_tensors
from fedweave.backbone.load import load_backbone
from fedweave.backbone.quantised import kept_weights
from fedweave.bundle.adapter import read_tensors
from fedweave.config import BackboneConfig
from fedweave.errors import UserError
from fedweave.files import file_sha256
from fedweave.json_files import sealed
from tests.backbone.test_gguf import original, write_gguf  # noqa: F401  (a fixture)
from tests.test_damage import place_of

TRIES = int(os.environ.get("FEDWEAVE_DAMAGES", "60"))
ODD = [None, True, -1, 0, 1, 2, 7, 99999, 2**31, 2**40, 2**62, 2**70, 0.5, -0.5, 1e300, float("nan"), float("inf"),
       "", "x", "../../x", "\x1b[2J", [], {}, [[]], [1], ["x"], {"a": None}]  # fmt: skip


@contextmanager
def little_memory(more: int = 3 << 30) -> Iterator[None]:
    """A process that asks for gigabytes gets an error instead."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# -------------------------------------------------------------------------------------- bundles


def another_value(tree: object, dice: random.Random) -> None:
    """Somewhere in a tree of JSON something else, or less, or more."""
    inner, path = tree, []
    while isinstance(inner, dict | list) and inner and (not path or dice.random() < 0.8):
        key = dice.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        path.append((inner, key))
        inner = inner[key]
    holder, key = path[-1]
    kind = dice.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(inner, list):
        holder[key] = inner * 2
    elif kind == 2 and isinstance(inner, int | float):
        holder[key] = dice.choice([-inner, inner + 1, inner * 1000])
    else:
        holder[key] = dice.choice(ODD)


def other_tensors(file: Path, dice: random.Random) -> None:
    tensors = load_file(file)
    name = dice.choice(sorted(tensors))
    kind, one = dice.randrange(8), tensors[name]
    if kind == 0:
        del tensors[name]
    elif kind in (1, 2):
        one.view(-1)[dice.randrange(one.numel())] = dice.choice([float("inf"), float("nan"), -float("inf")])
    elif kind == 3:
        tensors[name] = one.to(dice.choice([torch.int8, torch.bool, torch.complex64, torch.float16, torch.int64]))
    elif kind == 4:
        tensors[name] = one.flatten()[: dice.choice([0, 1, 7])].clone()
    elif kind == 5:
        tensors[name] = one * dice.choice([1e30, 1e38, -1e20])
    elif kind == 6:
        tensors[dice.choice(["", "x", name + ".x", "\x1b[2J"])] = one.clone()
    else:
        tensors[name] = one.repeat(dice.choice([2, 3]), *[1] * (one.dim() - 1))
    save_file(tensors, file, {"format": "pt"})


def other_header(file: Path, dice: random.Random) -> None:
    """A safetensors header that announces something else."""
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    another_value(header, dice)
    text = json.dumps(header).encode()
    length = dice.choice([len(text)] * 6 + [2**62, 0, len(data) * 2])
    file.write_bytes(struct.pack("<Q", length) + text + data[8 + size :])


def spoil(bundle: Path, dice: random.Random) -> str:
    """Spoil a bundle and seal it anew, as somebody who means harm would; what was done."""
    described = bundle / "fedweave.json"
    tree = json.loads(described.read_text())
    tree.pop("checksum")
    tensors = sorted(bundle.rglob("*.safetensors"))
    kind = dice.choice(["description"] * 4 + ["tensors"] * 4 + ["header", "bytes", "adapter_config"])
    what = kind
    if kind == "description":
        tree.pop("files")
        another_value(tree, dice)
        tree["files"] = {}
    elif kind == "tensors":
        other_tensors(dice.choice(tensors), dice)
    elif kind == "header":
        other_header(dice.choice(tensors), dice)
    elif kind == "adapter_config":
        file = dice.choice(sorted(bundle.rglob("adapter_config.json")))
        settings = json.loads(file.read_text())
        another_value(settings, dice)
        file.write_text(json.dumps(settings))
    else:
        file = dice.choice(sorted(path for path in bundle.rglob("*") if path.is_file() and path != described))
        data = bytearray(file.read_bytes())
        for _ in range(dice.choice([1, 8])):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(bytes(data))
        what = f"bytes of {file.name}"
    if isinstance(tree.get("files"), dict):
        files = (path for path in bundle.rglob("*") if path.is_file() and path != described)
        tree["files"] = {str(path.relative_to(bundle)): file_sha256(path) for path in files}
    described.write_text(sealed(tree))
    return what


def test_a_bundle_that_means_harm_is_refused_or_loads_finite(exported, tmp_path):
    failures, outcomes = [], {"refused": 0, "loaded": 0}
    for number in range(TRIES):
        bundle = shutil.copytree(exported, tmp_path / "bundle")
        what = spoil(bundle, random.Random(number))
        try:
            with little_memory():
                model = fedweave.load(bundle, device="cpu")
                answer = model.generate(["How many?"], max_new_tokens=2)[0]
            told = [model.experts.theta, model.experts.phi, torch.tensor(answer.weights)]
            assert all(part is None or part.isfinite().all() for part in told), "infinite weights"
            outcomes["loaded"] += 1
        except UserError as error:
            assert "\n" not in str(error) and str(error).isprintable(), (number, str(error))
            outcomes["refused"] += 1
        except Exception as error:
            failures.append((number, what, place_of(error)))
        shutil.rmtree(bundle)
    assert not failures, "\n".join(map(str, failures))
    assert min(outcomes.values()) > 0, outcomes


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinite_weights_of_a_bundle_are_refused_by_name(exported, tmp_path, value):
    file = shutil.copy(exported / "router.safetensors", tmp_path)
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[3] = value
    save_file(tensors, file)
    with pytest.raises(UserError, match="not finite"):
        read_tensors(Path(file))


# -------------------------------------------------------------------------------------- GGUF


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory, original) -> bytes:  # noqa: F811
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", original).read_bytes()


def load(path: Path, weights: str = "dense"):
    return load_backbone(BackboneConfig(model=str(path), device="cpu", max_length=128, weights=weights))


def announcing(count: int, kind: int = 4) -> bytes:
    """A file of a hundred bytes whose one setting is a list of so many numbers."""
    key = b"tokenizer.ggml.token_type"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    return head + struct.pack("<IIQ", 9, kind, count) + bytes(51)


@pytest.mark.parametrize("content", [announcing(2**34), announcing(2**60), announcing(2**22, 8), announcing(1, 9)])
def test_a_small_file_that_announces_much_is_refused_at_once(tmp_path, content):
    path = tmp_path / "small.gguf"
    path.write_bytes(content)
    with little_memory(1 << 30), pytest.raises(UserError, match="cannot be read as a GGUF language model"):
        load(path)


def test_tensors_that_share_their_bytes_are_refused(tmp_path):
    """A thousand that lie in the same place would become a thousand in memory."""
    path, tensors = tmp_path / "small.gguf", b""
    for name in (b"a", b"b"):
        tensors += struct.pack("<Q", 1) + name + struct.pack("<IQIQ", 1, 64, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + tensors
    path.write_bytes(head + bytes(-len(head) % 32 + 4 * 64))
    with pytest.raises(ValueError, match="overlap"):
        stored_tensors(path)


@pytest.mark.parametrize("weights", ["dense", "stored"])
def test_a_spoilt_gguf_is_refused_or_loads_finite(small_gguf, tmp_path, monkeypatch, weights):
    """Most of what is changed lies in the header: settings, tables and shapes."""
    monkeypatch.setattr(conversion, "CACHE", tmp_path / "cache")
    header = len(small_gguf) // 6
    failures = []
    for number in range(TRIES):
        dice, data = random.Random(number), bytearray(small_gguf)
        kind = dice.randrange(4)
        if kind == 0:
            data = data[: dice.randrange(len(data))]
        for _ in range(dice.choice([1, 2, 8])):
            at = dice.randrange(min(header if kind < 3 else len(data), len(data)))
            if dice.random() < 0.5:
                data[at] ^= 1 << dice.randrange(8)
            else:
                value = dice.choice([0, 1, 2**31, 2**62, 2**64 - 1])
                data[at : at + 8] = struct.pack("<Q", value)
        path = tmp_path / f"case{number}.gguf"
        path.write_bytes(bytes(data))
        try:
            with little_memory():
                backbone = load(path, weights)
            kept = kept_weights(backbone.model, unpacked=True)
            assert all(numbers.isfinite().all() for _, numbers in kept), "infinite weights"
        except UserError as error:
            assert "\n" not in str(error) and str(error).isprintable(), (number, str(error))
        except Exception as error:
            failures.append((number, place_of(error)))
        path.unlink()
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert not failures, "\n".join(map(str, failures))
