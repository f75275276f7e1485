"""Data sets of the Hugging Face hub as a data source: `hf://datasets/ORG/NAME@REVISION`.

The revision is resolved to a commit, which is written to the manifest. Files come from the hub's cache on this machine;
missing ones are downloaded. A commit that is named in full needs no request if its files are cached.
"""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import yaml

from tunewell.core.errors import UserError, did_you_mean
from tunewell.core.files import open_file, read_text, sha256_file, write_atomic
from tunewell.core.progress import Progress
from tunewell.data.sources.base import SourceOptions, detect_format
from tunewell.data.sources.local import select_row_files
from tunewell.features.remote.address import Address, compile_pattern
from tunewell.features.remote.cache import ObjectCache, cache_key
from tunewell.features.remote.store import RemoteObject
from tunewell.model_files.checks import hub_cache
from tunewell.model_files.files import hub_is_out_of_reach

_ADDRESS = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w./-]+))?/?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPLIT_NAMES = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
"""Names of splits in file and folder names, as `datasets` knows them."""
_CARD = "README.md"
_NUM_NAMED = 10


@dataclass
class _Repository:
    """A data set at one commit."""

    name: str
    commit: str
    files: dict[str, int]
    """Size in bytes by path."""
    is_offline: bool
    fetched: dict[str, Path] = field(default_factory=dict[str, Path])

    def fetch(self, path: str) -> Path:
        """Return a file in the hub's cache; download it if it is missing."""
        if path not in self.fetched:
            from huggingface_hub import (
                hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
                try_to_load_from_cache,
            )

            found: object = try_to_load_from_cache(self.name, path, repo_type="dataset", revision=self.commit)
            if not isinstance(found, str):
                if self.is_offline:  # the hub's library sends requests even if it may use local files only
                    raise UserError(
                        f"`{path}` of the data set `{self.name}` is not in the hub's cache, and offline mode is on",
                        fix="run the command once without `--offline` and without HF_HUB_OFFLINE",
                    )
                with _explained(self.name, self.commit), _quiet():
                    found = hf_hub_download(self.name, path, repo_type="dataset", revision=self.commit)
            self.fetched[path] = Path(str(found))
        return self.fetched[path]


@dataclass(frozen=True)
class HubFile:
    """One file of a data set."""

    repository: _Repository = field(repr=False)
    path: str
    options: SourceOptions = field(repr=False)

    @classmethod
    def find(cls, path: str, *, base: Path, options: SourceOptions) -> list["HubFile"]:
        """Return the files of the split in the order of their names; raise UserError if there are none."""
        address = _ADDRESS.fullmatch(path)
        if address is None:
            raise UserError(
                f"`{path}` is not the address of a data set",
                fix="write `hf://datasets/ORG/NAME@REVISION`; `config` and `split` are keys of the source",
            )
        repository = _open(address[1], address[2] or "main", options)
        return [cls(repository, name, options) for name in _choose_files(repository, options)]

    @property
    def name(self) -> str:
        return f"hf://datasets/{self.repository.name}/{self.path}"

    def open(self) -> BinaryIO:
        """Open the copy in the hub's cache; download it first if necessary."""
        return open_file(self._fetch())

    def _fetch(self) -> Path:
        if self.path not in self.repository.fetched:
            self.options.progress(Progress("downloading", 0, self.size(), "bytes"))
        return self.repository.fetch(self.path)

    def size(self) -> int:
        """Return the size in bytes."""
        return self.repository.files[self.path] or self._fetch().stat().st_size

    def stamp(self) -> str:
        """Return the commit."""
        return self.repository.commit

    def sha256(self) -> str:
        """Hash the file."""
        return sha256_file(self._fetch())

    def version(self) -> str:
        """Return the commit."""
        return self.repository.commit


def _open(name: str, revision: str, options: SourceOptions) -> _Repository:
    """Resolve the revision and list the files: from the cache for a known commit and offline, else from the hub."""
    cache, is_offline = ObjectCache(options.storage), options.storage.offline or _hub_is_offline()
    commit = revision if _COMMIT.fullmatch(revision) else _cached_commit(name, revision) if is_offline else None
    if commit is not None:
        files = _known_files(name, commit, cache, is_offline=is_offline)
        if files is not None:
            return _Repository(name, commit, files, is_offline)
    if is_offline:
        raise UserError(
            f"the data set `{name}` of the hub at `{revision}` is not in the hub's cache, and offline mode is on",
            where=f"hf://datasets/{name}",
            fix="run the command once without `--offline` and without HF_HUB_OFFLINE",
        )
    if (problem := hub_is_out_of_reach()) is not None:
        raise UserError(
            f"the data set `{name}` of the hub cannot be downloaded: {problem}",
            where=f"hf://datasets/{name}",
            fix="check your network, use the files of an earlier download with `--offline`, or use local rows",
        )
    options.progress(Progress(f"looking up {name}"))
    from huggingface_hub import HfApi

    with _explained(name, revision):
        about: Any = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    files = {entry.rfilename: int(entry.size or 0) for entry in about.siblings or ()}
    address = _listing_address(name, about.sha)
    cache.save_listing(cache_key(address), [RemoteObject(address.with_key(path), files[path], "") for path in files])
    _save_reference(name, revision, about.sha)
    return _Repository(name, str(about.sha), files, is_offline)


def _listing_address(name: str, commit: str) -> Address:
    return Address("hf", "datasets", f"{name}@{commit}")


def _known_files(name: str, commit: str, cache: ObjectCache, *, is_offline: bool) -> dict[str, int] | None:
    """Return the files of a commit: from our listing, or offline from what the hub's cache has, which may be a part."""
    address = _listing_address(name, commit)
    listed = cache.load_listing(cache_key(address), address)
    if listed is not None:
        return {entry.address.key: entry.size for entry in listed}
    if not is_offline:
        return None
    folder = _cache_folder(name) / "snapshots" / commit
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files} or None


def _cache_folder(name: str) -> Path:
    return hub_cache() / f"datasets--{name.replace('/', '--')}"


def _cached_commit(name: str, revision: str) -> str | None:
    path = _cache_folder(name) / "refs" / revision
    return read_text(path).strip() if path.is_file() else None


def _save_reference(name: str, revision: str, commit: str) -> None:
    """Record the commit of a branch in the hub's cache, as the hub's library does when it downloads by branch."""
    if not _COMMIT.fullmatch(revision):
        path = _cache_folder(name) / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, commit)


def _hub_is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE) or bool(os.environ.get("HF_DATASETS_OFFLINE"))


def _choose_files(repository: _Repository, options: SourceOptions) -> list[str]:
    readable = [path for path in sorted(repository.files) if detect_format(path)[0] and not path.startswith(".")]
    files = [str(path) for path in select_row_files([PurePosixPath(path) for path in readable])]
    if not any(detect_format(path)[0] not in ("md", None) for path in files):
        raise UserError(
            f"the data set `{repository.name}` has no file of rows",
            where=", ".join(sorted(repository.files)[:_NUM_NAMED]) or "it is empty",
            fix="data sets made by a script have none; try `@refs/convert/parquet` as the revision",
        )
    split = options.split or "train"
    configs = _card_configs(repository)
    if configs:
        patterns = _patterns_of(repository.name, configs, options.config)
        if split not in patterns:
            raise _unknown("split", split, list(patterns), repository.name)
        chosen = [path for path in files if any(_matches(path, pattern) for pattern in patterns[split])]
        if not chosen:
            raise UserError(f"no file of `{repository.name}` matches {', '.join(patterns[split])}")
        return chosen
    return _by_name(repository.name, files, options.config, split)


def _by_name(name: str, files: list[str], config: str | None, split: str) -> list[str]:
    """Choose files by folder and file names: `CONFIG/train-00000.parquet`, `data/validation.jsonl`."""
    folders = sorted({PurePosixPath(path).parts[0] for path in files if "/" in path} - {"data"})
    if config is not None:
        files = [path for path in files if path.startswith(f"{config}/")]
        if not files:
            raise _unknown("config", config, folders, name)
    splits = {known: [path for path in files if _has_name(path, words)] for known, words in _SPLIT_NAMES.items()}
    named = {known: found for known, found in splits.items() if found}
    if not named and split == "train":
        return files
    if split not in named:
        raise _unknown("split", split, list(named), name)
    return named[split]


def _has_name(path: str, words: str) -> bool:
    return re.search(rf"(?:^|[/_.\-])(?:{words})(?:[/_.\-]|\d|$)", path.lower()) is not None


def _card_configs(repository: _Repository) -> list[dict[str, Any]]:
    """Return the list `configs` of the data set's card that name files, or an empty list."""
    if _CARD not in repository.files:
        return []
    try:
        text = read_text(repository.fetch(_CARD), errors="replace")
        configs: Any = yaml.safe_load(text.split("---", 2)[1] if text.startswith("---") else "")["configs"]
        return [entry for entry in configs if "data_files" in entry]
    except (UserError, OSError, LookupError, TypeError, yaml.YAMLError):
        return []


def _patterns_of(name: str, configs: list[dict[str, Any]], wanted: str | None) -> dict[str, list[str]]:
    """Return the patterns of the files of each split of one configuration."""
    names = [str(entry.get("config_name", "default")) for entry in configs]
    defaults = [name for name, entry in zip(names, configs, strict=True) if entry.get("default")]
    defaults += ["default"] if "default" in names else names if len(names) == 1 else []
    chosen = next(iter(defaults), None) if wanted is None else wanted
    if chosen is None:
        raise UserError(
            f"the data set `{name}` has several configurations: {', '.join(names[:_NUM_NAMED])}",
            fix="choose one with the key `config` of the source",
        )
    if chosen not in names:
        raise _unknown("config", chosen, names, name)
    entry = configs[names.index(chosen)]
    stored: Any = entry["data_files"]
    folder = f"{str(entry['data_dir']).strip('/')}/" if entry.get("data_dir") else ""
    if all(isinstance(one, str) for one in stored):  # a path, or several
        stored = [{"split": "train", "path": stored}]
    patterns: dict[str, list[str]] = {}
    for one in stored:
        paths: Any = [one["path"]] if isinstance(one["path"], str) else one["path"]
        patterns.setdefault(str(one["split"]), []).extend(f"{folder}{path}" for path in paths)
    return patterns


def _matches(path: str, pattern: str) -> bool:
    return compile_pattern(pattern).fullmatch(path) is not None or fnmatch(path, pattern)


def _unknown(key: str, wanted: str, known: list[str], name: str) -> UserError:
    close = [other for other in known if other[:2] == wanted[:2]]
    return UserError(
        f"the data set `{name}` has no {key} `{wanted}`",
        where=f"it has {', '.join(known[:_NUM_NAMED]) or 'none'}",
        fix=did_you_mean(close, f"set the key `{key}` of the source to one of them"),
    )


@contextmanager
def _explained(name: str, revision: str) -> Generator[None]:
    """Convert errors of the hub's library to a UserError."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    sign_in = "set the variable HF_TOKEN, or run `hf auth login`"
    problems: dict[type[Exception], tuple[str, str]] = {
        GatedRepoError: (f"the data set `{name}` is gated", f"accept its terms on its page, then {sign_in}"),
        RevisionNotFoundError: (f"the data set `{name}` has no revision `{revision}`", "name a branch, tag or commit"),
        RepositoryNotFoundError: (
            f"there is no data set `{name}` on the hub, or it is private",
            f"check the name; for a private one, {sign_in}",
        ),
        HFValidationError: (f"`{name}` is not the name of a data set", "check it; the hub allows no `--`"),
        LocalEntryNotFoundError: (
            f"a file of `{name}` is not in the hub's cache and cannot be downloaded",
            "check your network, or run the command once without `--offline`",
        ),
    }
    try:
        yield
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        text = f"status {status}" if status else type(error).__name__
        other = (f"the data set `{name}` cannot be read from the hub: {text}", "try again later")
        what, fix = next((found for kind, found in problems.items() if isinstance(error, kind)), other)
        raise UserError(what, fix=fix) from None


@contextmanager
def _quiet() -> Generator[None]:
    """Turn off the progress bars of the hub's library: only the command line prints."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            enable_progress_bars()
