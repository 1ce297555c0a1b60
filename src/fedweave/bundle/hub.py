"""Bundles on the Hugging Face hub: upload one, fetch one. Nothing here runs unless the user names a repository."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedweave.bundle.load import CARD, verify_bundle
from fedweave.errors import UserError, first_line

_SCHEME = "hf:"


def hub_repository(name: str | Path) -> str | None:
    """The repository of ``hf://owner/name``; None for anything else, which is a folder. A bare owner/name is always
    a folder: a misspelt path must not become a call to the network."""
    text = str(name)  # a Path folds the two slashes into one
    return text.removeprefix(_SCHEME).strip("/") if text.startswith(f"{_SCHEME}/") else None


def push_bundle(folder: Path, repository: str, private: bool = False) -> str:
    """Create the repository if need be, upload every file that fedweave.json lists; returns its address."""
    description = verify_bundle(folder)
    with _hub(repository, "upload"):
        from huggingface_hub import HfApi

        api = HfApi(library_name="fedweave")
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=["fedweave.json", CARD, *description["files"]],
            commit_message=f"FedWeave bundle of round {description['round']}",
        )
    return str(url)


def fetch_bundle(repository: str) -> Path:
    """The repository's bundle on this machine, downloaded if it is not there yet."""
    with _hub(repository, "download"):
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.md", "*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(repository, allow_patterns=patterns, library_name="fedweave"))


@contextmanager
def _hub(repository: str, what: str) -> Iterator[None]:
    """Whatever the hub has against it, in one sentence."""
    import httpx
    from huggingface_hub import errors

    if repository.count("/") != 1:
        raise UserError(f"{repository!r} is no repository name; it has the form owner/name.")
    try:
        yield
    except errors.HFValidationError as error:
        raise UserError(f"{repository!r} is no repository name: {first_line(error)}.") from None
    except errors.LocalTokenNotFoundError:
        raise UserError(f"this {what} needs a login; run `hf auth login` or set HF_TOKEN.") from None
    except errors.OfflineModeIsEnabled:
        raise UserError(f"HF_HUB_OFFLINE is set, which forbids the {what}; unset it.") from None
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            raise UserError(
                f"the hub refuses the {what} of {repository} ({status}); check the name, and log in with `hf auth "
                "login` as someone who may."
            ) from None
        raise UserError(
            f"the hub answered the {what} of {repository} with an error: {first_line(error)}."
        ) from None
    except (OSError, httpx.HTTPError) as error:
        raise UserError(f"the hub cannot be reached: {first_line(error)}.") from None
