"""Push a folder to object storage, and pull it back: a reader sees the old or the new version, never a mix.

PREFIX/push.json          the current version: its folder, and the size and SHA-256 of every file; written last
PREFIX/3f2a91c0d4e7/...   the files of one version; the name is a hash of them, so an interrupted push continues

Earlier versions stay in their folders, for readers that have begun to download them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.config.rules import Storage
from tunewell.core.errors import UserError
from tunewell.core.files import link_or_copy, sha256_text, stable_json
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.features.remote.address import Address, parse_address
from tunewell.features.remote.cache import ObjectCache
from tunewell.features.remote.fetch import fetch
from tunewell.features.remote.store import RemoteObject, RemoteStore

MANIFEST = "push.json"
FORMAT = "tunewell-push"


@dataclass(frozen=True)
class PushedFile:
    """One file of a version."""

    path: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class Pushed:
    """What a push did."""

    address: str
    version: str
    num_uploaded: int
    num_kept: int
    """Files that an earlier, interrupted push had uploaded."""
    num_bytes: int


def push_manifest(files: Mapping[str, PushedFile], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `push.json`. Equal files have the same version."""
    version = sha256_text(*(f"{name} {files[name].size} {files[name].sha256}" for name in sorted(files)))[:12]
    listed = {name: {"bytes": files[name].size, "sha256": files[name].sha256} for name in sorted(files)}
    return {"format": FORMAT, "format_version": 1, "version": version, **about, "files": listed}


def push_files(
    to: str,
    files: Mapping[str, PushedFile],
    about: Mapping[str, Any],
    *,
    settings: Storage,
    progress: ProgressListener = silent,
) -> Pushed:
    """Upload files under a prefix, and publish them by writing the manifest last."""
    prefix, store = _open_prefix(to, settings)
    manifest = push_manifest(files, about)
    version = str(manifest["version"])
    folder = prefix.with_key(f"{prefix.key}{version}")
    present = {entry.address.key: entry.size for entry in store.list(folder)}
    missing = [name for name, file in files.items() if present.get(f"{folder.key}/{name}") != file.size]
    total, done = sum(files[name].size for name in missing), 0
    for name in missing:
        progress(Progress("uploading", done, total, "bytes"))
        store.upload(files[name].path, folder.with_key(f"{folder.key}/{name}"))
        done += files[name].size
    progress(Progress("uploading", done, total, "bytes"))
    store.upload(stable_json(manifest).encode(), prefix.with_key(f"{prefix.key}{MANIFEST}"))
    return Pushed(str(folder), version, len(missing), len(files) - len(missing), total)


def pull_folder(address: str, folder: Path, *, settings: Storage, progress: ProgressListener = silent) -> None:
    """Download the current version of a pushed folder, and compare every file with the manifest."""
    prefix, store = _open_prefix(address, settings)
    manifest = _read_manifest(prefix, store)
    root = prefix.with_key(f"{prefix.key}{manifest['version']}")
    found = {entry.address.key.removeprefix(f"{root.key}/"): entry for entry in store.list(root)}
    entries: list[RemoteObject] = []
    for name in manifest["files"]:
        if Path(name).is_absolute() or ".." in Path(name).parts or name not in found:
            raise _damaged(prefix, f"`{name}` is missing")
        entries.append(found[name])
    places = fetch(store, entries, ObjectCache(settings), progress)
    for (name, record), (path, sha256) in zip(manifest["files"].items(), places, strict=True):
        if sha256 != record["sha256"]:
            raise _damaged(prefix, f"`{name}` differs from the manifest")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(path, target)


def _open_prefix(to: str, settings: Storage) -> tuple[Address, RemoteStore]:
    """Return the address of a prefix with a slash at its end, and its store."""
    if to.startswith("hf://"):
        raise UserError(
            f"`{to}` cannot be verified in place",
            fix="download it with `hf download USER/NAME --local-dir FOLDER`, then `tunewell verify FOLDER`",
        )
    address = parse_address(to)
    if address.is_web or address.is_pattern:
        raise UserError(f"`{to}` is not a prefix in a bucket", fix="write `s3://BUCKET/PREFIX` or `r2://BUCKET/PREFIX`")
    key = address.key.strip("/")
    return address.with_key(f"{key}/" if key else ""), RemoteStore(address, settings)


def _read_manifest(prefix: Address, store: RemoteStore) -> dict[str, Any]:
    data = store.read_all(prefix.with_key(f"{prefix.key}{MANIFEST}"))
    if data is None:
        what = f"there is no pushed folder at `{prefix}`"
        raise UserError(what, where=f"`{MANIFEST}` is missing", fix="check the address")
    try:
        manifest = json.loads(data)
        if manifest["format"] != FORMAT:
            raise ValueError
        return {"version": str(manifest["version"]), "files": dict(manifest["files"])}
    except (ValueError, KeyError, TypeError):
        raise _damaged(prefix, f"`{MANIFEST}` is not valid") from None


def _damaged(prefix: Address, what: str) -> UserError:
    return UserError(f"the pushed folder `{prefix}` is damaged: {what}", fix="push it again")
