"""Upload a bundle to a repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from fedweave.bundle.load import verify_bundle
from fedweave.errors import UserError, first_line


def push_bundle(folder: Path, repository: str, private: bool = False) -> str:
    """Create the repository if need be, upload every file that fedweave.json lists; returns its address."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    if repository.count("/") != 1:
        raise UserError(f"{repository!r} is no repository name; it has the form owner/name.")
    description = verify_bundle(folder)
    try:
        api = HfApi(library_name="fedweave")
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=["fedweave.json", *description["files"]],
            commit_message=f"FedWeave bundle of round {description['round']}",
        )
    except HFValidationError as error:
        raise UserError(f"{repository!r} is no repository name: {first_line(error)}.") from None
    except LocalTokenNotFoundError:
        raise UserError("pushing needs a login; run `hf auth login` or set HF_TOKEN.") from None
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set, so nothing is uploaded; unset it to push.") from None
    except HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise UserError(
                f"the hub refuses the upload to {repository} ({status}); log in with `hf auth login` as someone "
                "who may write there."
            ) from None
        raise UserError(
            f"the hub answered the upload to {repository} with an error: {first_line(error)}."
        ) from None
    except (OSError, httpx.HTTPError) as error:
        raise UserError(f"the hub cannot be reached: {first_line(error)}.") from None
    return str(url)
