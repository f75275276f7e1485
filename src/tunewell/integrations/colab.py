"""A config for another machine: its text without secrets, what has to be brought along, and where that will lie."""

import glob as globbing
import importlib.metadata
import json
import os
import tempfile
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import tunewell
from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.files import is_url
from tunewell.core.redact import redact
from tunewell.core.units import size_bytes


@dataclass(frozen=True)
class MovedConfig:
    """A config as another machine reads it."""

    text: str
    config: Config
    """What the text says there."""
    files: list[str]
    """Files and folders to bring, by the names they have there, from the config's folder."""
    notes: list[str]


def move_config(loaded: LoadedConfig) -> MovedConfig:
    """Write a config for a folder elsewhere; comments stay, and paths that lead out of the config's folder become names
    in it.

    Raises UserError for a pattern that leads out, and where nothing readable is left without the secrets.
    """
    assert loaded.file is not None
    text = "\n".join(loaded.file.read_text(encoding="utf-8-sig").splitlines()) + "\n"
    brought = _read_paths(loaded)
    swaps = _names_inside([*brought, loaded.config.corpus, loaded.config.run])
    notes = [f"`{old}` is `{new}` in the notebook" for old, new in swaps.items()]
    bare = redact(text)
    if bare != text:
        notes.append("a secret in the config was replaced by `[redacted]`; the notebook does not know it")
    moved = _swapped(bare, swaps)
    files = list(dict.fromkeys(name for path in brought for name in _as_files(loaded, path, swaps)))
    if redact(files) != files:
        raise UserError("the path of a file holds a secret", where=str(loaded.file), fix="give the file another name")
    for name in files:
        known = {new: old for old, new in swaps.items()}.get(name, name)
        if not loaded.path(known).exists():
            notes.append(f"`{known}` is not here now; the notebook will ask for it")
    notes += _heavy(loaded)
    return MovedConfig(moved, _config_in(moved), files, notes)


def _read_paths(loaded: LoadedConfig) -> list[str]:
    """List what the config names that lies on this machine."""
    config = loaded.config
    paths = [source.path for source in config.data.sources]
    if isinstance(config.data.held_out, str):
        paths.append(config.data.held_out)
    paths += [source.map.rpartition(":")[0] for source in config.data.sources if source.map]
    templates = (config.template.name, *(source.template for source in config.data.sources))
    paths += [name for name in templates if name and name.endswith(".jinja")]
    models = (config.model, config.tokenizer)
    local = [path for path in paths if not is_url(path)]
    return [*local, *(name for name in models if name and loaded.path(name).exists())]


def _names_inside(paths: list[str]) -> dict[str, str]:
    """Give every path that leads out of the folder a name inside it."""
    taken = {path for path in paths if not _leads_out(path)}
    swaps: dict[str, str] = {}
    for path in paths:
        if not _leads_out(path) or path in swaps:
            continue
        if globbing.has_magic(path):
            raise UserError(
                f"the pattern `{path}` leads out of the config's folder",
                fix="name the folder instead of the pattern, or put the rows beside the config",
            )
        name = Path(path).expanduser().resolve().name
        stem, number = name, 2
        while name in taken:
            name, number = f"{number}-{stem}", number + 1
        swaps[path] = name
        taken.add(name)
    return swaps


def _leads_out(path: str) -> bool:
    plain = Path(path).expanduser()
    return plain.is_absolute() or Path(os.path.normpath(plain)).parts[:1] == ("..",)


def _swapped(text: str, swaps: dict[str, str]) -> str:
    """Put other paths into the text of a config, and leave all else in it as it is."""
    for event in reversed(list(yaml.parse(text, Loader=yaml.SafeLoader)) if swaps else []):
        if isinstance(event, yaml.ScalarEvent):
            for old, new in swaps.items():
                # Behind a path there may be a limit (`#500`) or the name of a function (`:convert`).
                if event.value == old or event.value.startswith((f"{old}#", f"{old}:")):
                    written = yaml.safe_dump(new + event.value.removeprefix(old), allow_unicode=True, width=10**9)
                    text = text[: event.start_mark.index] + written.splitlines()[0] + text[event.end_mark.index :]
                    break
    return text


def _as_files(loaded: LoadedConfig, path: str, swaps: dict[str, str]) -> list[str]:
    if globbing.has_magic(path) and not loaded.path(path).exists():
        # As data.sources.files does it: the folder may have brackets in its own name.
        found = sorted(globbing.glob(path, root_dir=loaded.base, recursive=True))  # noqa: PTH207
        if not found:
            raise UserError(f"no file matches `{path}`", where=str(loaded.file))
        return [Path(name).as_posix() for name in found]
    return [swaps.get(path, Path(path).as_posix())]


def _heavy(loaded: LoadedConfig) -> list[str]:
    """Say what a model on this machine costs to bring along."""
    name = loaded.config.model
    if not name or not (place := loaded.path(name)).exists():
        return []
    files = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]
    size = size_bytes(sum(file.stat().st_size for file in files))
    return [f"the model lies on this machine and must be brought too, {size}; a hub id in the config would spare that"]


def _config_in(text: str) -> Config:
    """Read a config's text as the other machine will."""
    with tempfile.TemporaryDirectory(prefix="tunewell-notebook-") as folder:
        path = Path(folder) / FILE_NAME
        path.write_text(text, encoding="utf-8")
        try:
            return load_config(path).config
        except UserError as error:
            raise UserError(
                "the config cannot be read without its secrets",
                where=error.what,
                fix="take them out of the config; a token belongs in the environment",
            ) from None


# What pip installs in a notebook: the tunewell that writes it, from where that came, and packages with models.

PACKAGE = "package:"
_EXTRAS = "[train,export]"
_NAME_IT = "name where pip finds it with `--package`: `git+https://HOST/OWNER/tunewell@COMMIT`, a wheel, or `none`"


def requirement(package: str | None, notes: list[str]) -> list[str]:
    """Say what pip is to install: what is installed here, or what the person names, with the extras where it has none.

    Raises UserError where this one came from a folder, which no other machine has, and for an address with a secret.
    """
    if package == "none":
        return []
    found = _installed() if package is None else package
    if redact(found) != found:
        raise UserError("the package's address holds a secret, which everyone could read", where="--package")
    if "://" in found:
        return [found if " @ " in found else f"tunewell{_EXTRAS} @ {found}"]
    if found.endswith((".whl", ".tar.gz")):
        notes.append(f"put `{Path(found).name}` beside the notebook; in Colab drop it into the files at the left")
        return [f"../{Path(found).name}{_EXTRAS}"]
    return [found]


def model_packages(loaded: LoadedConfig) -> list[str]:
    """List the packages that a model or a tokenizer is read from, at the versions that are here."""
    named = [name for name in (loaded.config.model, loaded.config.tokenizer) if name and name.startswith(PACKAGE)]
    found = []
    for name in dict.fromkeys(name.removeprefix(PACKAGE) for name in named):
        modules = importlib.metadata.packages_distributions()
        try:
            package = importlib.metadata.distribution(modules.get(name.replace("-", "_"), [name])[0])
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"there is no installed package `{name}`", fix="install it, so that its version is known"
            ) from None
        found.append(f"--no-deps {package.name}=={package.version}")
    return found


def _installed() -> str:
    """Say how pip gets the tunewell that runs here: from an index, or from the address it came from, at its commit."""
    origin = direct_url()
    if origin is None:
        if "+" in tunewell.__version__:
            raise UserError(f"this is tunewell {tunewell.__version__}, which pip cannot find", fix=_NAME_IT)
        return f"tunewell{_EXTRAS}=={tunewell.__version__}"
    address = str(origin.get("url", ""))
    if urllib.parse.urlsplit(address).scheme in ("", "file"):
        raise UserError(
            "this tunewell was installed from a folder or a file, which the notebook cannot reach",
            where=address or None,
            fix=_NAME_IT,
        )
    marks = [f"subdirectory={origin['subdirectory']}"] if origin.get("subdirectory") else []
    if control := origin.get("vcs_info"):
        address = f"{control['vcs']}+{address}@{control['commit_id']}"
    elif sha := (origin.get("archive_info") or {}).get("hashes", {}).get("sha256"):
        marks.append(f"sha256={sha}")
    return f"{address}#{'&'.join(marks)}" if marks else address


def direct_url() -> dict[str, Any] | None:
    """Read where pip had this tunewell from; None where that is an index, as PEP 610 says."""
    try:
        text = importlib.metadata.distribution("tunewell").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {"url": Path(__file__).parents[1].as_uri()}  # not installed at all: run from its sources
    return json.loads(text) if text else None
