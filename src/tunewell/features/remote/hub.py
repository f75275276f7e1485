"""Push files to a model repository of the Hugging Face hub, as one commit."""

import re
from collections.abc import Mapping
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import stable_json
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.features.remote.push import MANIFEST, Pushed, PushedFile, push_manifest
from tunewell.model_files.files import hub_is_out_of_reach

_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)/?")


def repository_of(to: str) -> str:
    """Return `USER/NAME` of an address; raise UserError for anything else."""
    found = _ADDRESS.fullmatch(to)
    if found is None or found[1].startswith("datasets/"):
        raise UserError(f"`{to}` is not a model repository of the hub", fix="write `hf://USER/NAME`")
    return found[1]


def push_to_hub(
    to: str,
    files: Mapping[str, PushedFile],
    about: Mapping[str, Any],
    *,
    is_public: bool,
    progress: ProgressListener = silent,
) -> Pushed:
    """Upload files and the manifest in one commit. The hub keeps finished uploads of an interrupted push."""
    name = repository_of(to)
    if (problem := hub_is_out_of_reach()) is not None:
        raise UserError(f"`{name}` cannot be pushed: {problem}", fix="check your network")
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    manifest = push_manifest(files, about)
    operations = [CommitOperationAdd(path, str(file.path)) for path, file in files.items()]
    operations.append(CommitOperationAdd(MANIFEST, stable_json(manifest).encode()))
    progress(Progress(f"uploading to {name}"))
    try:
        api = HfApi()
        api.create_repo(name, private=not is_public, exist_ok=True)
        commit = api.create_commit(name, operations, commit_message=f"Push {manifest['version']} with tunewell")
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise UserError(
                f"the hub refuses to write `{name}` (status {status})",
                fix="set the variable HF_TOKEN to a token that may write, or run `hf auth login`; check the user name",
            ) from None
        raise UserError(f"`{name}` cannot be pushed: status {status}", fix="run the command again") from None
    total = sum(file.size for file in files.values())
    return Pushed(f"hf://{name}@{commit.oid}", str(manifest["version"]), len(files), 0, total)
