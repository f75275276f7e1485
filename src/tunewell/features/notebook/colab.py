"""Adapt a config for a Colab notebook: remove secrets, rewrite paths, list the files and the pip requirements."""

import glob as globbing
import importlib.metadata
import os
import re
import urllib.parse
from dataclasses import dataclass, replace
from pathlib import Path

import tunewell
from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.config.schema import Config
from tunewell.config.yaml_reader import read_yaml
from tunewell.core.errors import UserError, did_you_mean
from tunewell.core.files import is_url, read_text
from tunewell.core.optional import direct_url
from tunewell.core.redact import redact
from tunewell.core.units import size_bytes
from tunewell.model_files.catalogue import close_models
from tunewell.model_files.ollama import PREFIX as OLLAMA

PACKAGE = "package:"
_EXTRAS = "[train,export]"
_NAME_PACKAGE = "set `--package` to `git+https://HOST/OWNER/tunewell@COMMIT`, a wheel, or `none`"


@dataclass(frozen=True)
class PortableConfig:
    """A copy of a config that works on another machine."""

    text: str
    config: Config
    """The config parsed from `text`."""
    files: list[str]
    """Files and folders that the config needs, relative to the config's folder on the other machine."""
    notes: list[str]


def make_portable(loaded: LoadedConfig) -> PortableConfig:
    """Return a copy of a config for another machine; paths outside its folder are replaced, comments are preserved.

    Raises UserError for a glob outside the folder, or if the config is invalid without its secrets.
    """
    assert loaded.file is not None
    text = "\n".join(read_text(loaded.file, encoding="utf-8-sig").splitlines()) + "\n"
    paths = _local_paths(loaded)
    renames = _names_inside([*paths, loaded.config.corpus, loaded.config.run])
    notes = [f"`{old}` is `{new}` in the notebook" for old, new in renames.items()]
    redacted = redact(text)
    if redacted != text:
        notes.append("a secret in the config was replaced by `[redacted]` in the notebook")
    portable = _with_paths(redacted, renames)
    config = _parse(portable)
    if outside := [path for path in _local_paths(replace(loaded, config=config)) if _is_outside(path)]:
        raise UserError(f"`{outside[0]}` cannot be replaced in the config", fix="move the file beside the config")
    files = list(dict.fromkeys(name for path in paths for name in _as_files(loaded, path, renames)))
    if redact(files) != files:
        raise UserError("the path of a file contains a secret", where=str(loaded.file), fix="rename the file")
    originals = {new: old for old, new in renames.items()}
    missing = [known for name in files if not loaded.path(known := originals.get(name, name)).exists()]
    notes += [f"`{known}` does not exist here; the notebook will ask for it" for known in missing]
    notes += _model_size_note(loaded)
    return PortableConfig(portable, config, files, notes)


def _local_paths(loaded: LoadedConfig) -> list[str]:
    """Return the local files and folders that the config refers to."""
    config = loaded.config
    paths = [source.path for source in config.data.sources]
    if config.data.held_out_file is not None:
        paths.append(config.data.held_out_file)
    paths += [source.map.rpartition(":")[0] for source in config.data.sources if source.map]
    templates = (config.template.name, *(source.template for source in config.data.sources))
    paths += [name for name in templates if name and name.endswith(".jinja")]
    models = (config.model, config.tokenizer)
    local = [path for path in paths if not is_url(path)]
    return [*local, *(name for name in models if name and loaded.path(name).exists())]


def _names_inside(paths: list[str]) -> dict[str, str]:
    """Return a new name inside the config's folder for every path outside it."""
    taken = {path for path in paths if not _is_outside(path)}
    renames: dict[str, str] = {}
    for path in paths:
        if not _is_outside(path) or path in renames:
            continue
        if globbing.has_magic(path):
            raise UserError(
                f"the glob `{path}` is outside the config's folder",
                fix="use a folder instead of a glob, or move the rows beside the config",
            )
        name = Path(path).expanduser().resolve().name
        stem, number = name, 2
        while name in taken:
            name, number = f"{number}-{stem}", number + 1
        renames[path] = name
        taken.add(name)
    return renames


def _is_outside(path: str) -> bool:
    plain = Path(path).expanduser()
    return plain.is_absolute() or Path(os.path.normpath(plain)).parts[:1] == ("..",)


def _with_paths(text: str, renames: dict[str, str]) -> str:
    """Replace paths in the text of a config; comments stay. A limit (`#500`) or a function may follow a path."""
    for old in sorted(renames, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./~]){re.escape(old)}(?![\w./-])", lambda _, old=old: renames[old], text)
    return text


def _as_files(loaded: LoadedConfig, path: str, renames: dict[str, str]) -> list[str]:
    if globbing.has_magic(path) and not loaded.path(path).exists():
        # As in data.sources.files, the folder's own name may contain brackets.
        found = sorted(globbing.glob(path, root_dir=loaded.base, recursive=True))  # noqa: PTH207
        if not found:
            raise UserError(f"no file matches `{path}`", where=str(loaded.file))
        return [Path(name).as_posix() for name in found]
    return [renames.get(path, Path(path).as_posix())]


def _model_size_note(loaded: LoadedConfig) -> list[str]:
    """Return a note with the size of the model if it is local and must be uploaded."""
    name = loaded.config.model
    if not name or not (path := loaded.path(name)).exists():
        return []
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    size = size_bytes(sum(file.stat().st_size for file in files))
    return [f"the model is a local file and must be uploaded too ({size}); use a hub id to avoid that"]


def _parse(text: str) -> Config:
    """Parse the text of a config as on the other machine; raise UserError if it is invalid."""
    try:
        return load_config(read_yaml(text, FILE_NAME).value).config
    except UserError as error:
        raise UserError(
            "the config is invalid without its secrets",
            where=error.what,
            fix="remove the secrets from the config, and set tokens as environment variables",
        ) from None


def requirement(package: str | None, notes: list[str]) -> list[str]:
    """Return the pip requirement for tunewell: `package` or this version; raise UserError if pip cannot use it."""
    if package == "none":
        return []
    found = _installed() if package is None else package
    if redact(found) != found:
        raise UserError("the package URL contains a secret, which would be visible in the notebook", where="--package")
    if "://" in found:
        return [found if " @ " in found else f"tunewell{_EXTRAS} @ {found}"]
    if found.endswith((".whl", ".tar.gz")):
        notes.append(f"copy `{Path(found).name}` beside the notebook; in Colab, drag it into the file list on the left")
        return [f"../{Path(found).name}{_EXTRAS}"]
    return [found]


def model_packages(loaded: LoadedConfig) -> list[str]:
    """Return pip requirements for the packages that contain the model or the tokenizer, at their installed versions.

    Raises UserError for a model of Ollama, which is on this machine only.
    """
    if (model := loaded.config.model or "").startswith(OLLAMA):
        raise UserError(
            f"`{model}` is in Ollama's folder on this machine, which the notebook cannot access",
            where=loaded.origin("model"),
            fix=did_you_mean(close_models(model), "set `model` to a hub id: `tunewell models` lists some"),
        )
    named = [name for name in (loaded.config.model, loaded.config.tokenizer) if name and name.startswith(PACKAGE)]
    found, modules = [], importlib.metadata.packages_distributions() if named else {}
    for name in dict.fromkeys(name.removeprefix(PACKAGE) for name in named):
        try:
            package = importlib.metadata.distribution(modules.get(name.replace("-", "_"), [name])[0])
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"the package `{name}` is not installed", fix="install it with pip, so that its version is known"
            ) from None
        found.append(f"--no-deps {package.name}=={package.version}")
    return found


def _installed() -> str:
    """Return the pip requirement for the installed tunewell: a version on an index, or a URL with a commit."""
    origin = direct_url()
    if origin is None:
        if "+" in tunewell.__version__:
            raise UserError(f"tunewell {tunewell.__version__} is not on a package index", fix=_NAME_PACKAGE)
        return f"tunewell{_EXTRAS}=={tunewell.__version__}"
    url = str(origin.get("url", ""))
    if urllib.parse.urlsplit(url).scheme in ("", "file"):
        raise UserError(
            "tunewell was installed from a local folder or file, which the notebook cannot access",
            where=url or None,
            fix=_NAME_PACKAGE,
        )
    fragments = [f"subdirectory={origin['subdirectory']}"] if origin.get("subdirectory") else []
    if control := origin.get("vcs_info"):
        url = f"{control['vcs']}+{url}@{control['commit_id']}"
    elif sha := (origin.get("archive_info") or {}).get("hashes", {}).get("sha256"):
        fragments.append(f"sha256={sha}")
    return f"{url}#{'&'.join(fragments)}" if fragments else url
