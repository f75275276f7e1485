"""What repeats a run and what goes on with it: its config, written into its folder, and a command."""

import json
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tunewell.config.keys import parse_key, without_alias
from tunewell.config.load import FILE_NAME, GIVEN, Given, Loaded, as_loaded, load_config
from tunewell.config.overrides import relative
from tunewell.config.schema import Config, SourceConfig
from tunewell.config.yaml_reader import plain_value
from tunewell.core.errors import UserError
from tunewell.core.files import is_url
from tunewell.core.redact import REDACTED, redact
from tunewell.records.rundir import RUN_CONFIG

FIRST_COMMAND_AGAIN = "give the command that began the run once more, with `--resume`"


def load_for_run(given: Given, sets: Sequence[str] = (), *, is_resuming: bool, **flags: Any) -> Loaded:
    """Load a config to train by; a run that goes on has its own, which counts where no other is there or named."""
    sets = [sets] if isinstance(sets, str) else sets
    is_bare = given is None or given == ""
    own = _own_config(sets) if is_resuming and is_bare and flags.get("model") is None else None
    if own is None:
        return as_loaded(given, sets, **flags)
    loaded = load_config(own, sets, **flags)
    if REDACTED in json.dumps(loaded.config.model_dump(mode="json"), ensure_ascii=False):
        raise UserError(
            "a secret was taken out of the run's settings, so they do not say all that is needed",
            where=str(loaded.path(loaded.config.run) / RUN_CONFIG),
            fix=FIRST_COMMAND_AGAIN,
        )
    return loaded


def _own_config(sets: Sequence[str]) -> dict[str, Any] | None:
    """Read a run's own config, with paths that hold from the current folder; None where another or no run is there."""
    place = load_config(sets=[text for text in sets if _key(text) == ("run",)])
    folder = place.path(place.config.run)
    if place.file is not None or not (folder / RUN_CONFIG).is_file():
        return None
    own = load_config(folder / RUN_CONFIG)
    home, here = folder.resolve(), Path.cwd()
    tree = _with_paths(own, lambda path: relative(os.path.normpath(home / path), here))
    return tree | {"run": place.config.run}


def _key(text: str) -> tuple[str | int, ...]:
    """Give the key that a `--set` is about."""
    try:
        return without_alias(parse_key(text.partition("=")[0].strip()))
    except UserError:  # told when it is taken
        return ()


def config_of_run(loaded: Loaded) -> str:
    """Write the config down, every key that was set, with paths that hold from the run's folder, links or not."""
    home = loaded.path(loaded.config.run).resolve()
    config = _with_paths(loaded, lambda path: relative(loaded.path(path), home))
    return yaml.dump(redact(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _with_paths(loaded: Loaded, respelled: Callable[[str], str]) -> dict[str, Any]:
    """Give every key that was set, but the run's, and where the corpus is, with relative paths spelled anew."""
    config = loaded.config.model_dump(mode="json", exclude_unset=True, exclude={"run"})

    def seen(path: str) -> str:
        return path if is_url(path) or Path(path).expanduser().is_absolute() else respelled(path)

    for key in ("model", "tokenizer"):
        if config.get(key) and loaded.path(config[key]).exists():
            config[key] = seen(config[key])
    config["corpus"] = seen(loaded.config.corpus)
    data = config.get("data", {})
    if isinstance(data.get("held_out"), str):
        data["held_out"] = seen(data["held_out"])
    for source in data.get("sources", []):
        source |= {key: seen(source[key]) for key in ("path", "map") if source.get(key)}
    for holder, key in [
        (config.get("template", {}), "name"),
        *((source, "template") for source in data.get("sources", [])),
    ]:
        if str(holder.get(key, "")).endswith(".jinja"):
            holder[key] = seen(holder[key])
    return config


class _Dumper(yaml.SafeDumper):
    """Writes what our reader reads as it was: text like `1e5`, a number there, is quoted."""


def _quoted_if_needed(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain_value(text) == text else "'")


_Dumper.add_representer(str, _quoted_if_needed)


def _goes_on_by_its_own(loaded: Loaded) -> bool:
    """Say whether a run's folder is all that the command that goes on with it need name."""
    try:
        own = load_for_run(None, [f"run={json.dumps(loaded.config.run)}"], is_resuming=True)
    except UserError:
        return False
    return (own.file, own.base) == (None, loaded.base) and own.config.model_dump() == loaded.config.model_dump()


def _typed(loaded: Loaded, path: str) -> str:
    """Spell a path from the command line as it was typed in the current folder; the config has it from its own."""
    is_relative = not is_url(path) and not path.startswith("~") and not Path(path).is_absolute()
    return os.path.relpath(loaded.path(path)) if is_relative and loaded.base != Path() else path


def _typed_source(loaded: Loaded, source: SourceConfig) -> str:
    path = _typed(loaded, source.path)
    return path if source.limit is None else f"{path}#{source.limit}"


def resume_command(loaded: Loaded, *, allow_pickle: bool = False) -> str:
    """Give the command that goes on with this run, with whatever was said on the command line the first time.

    It is to be given in the folder where that was.
    """
    words = ["tunewell", "train", "--resume", *(["--allow-pickle"] if allow_pickle else [])]
    if _goes_on_by_its_own(loaded):
        where = loaded.config.run
        return shlex.join([*words, *(["--out", where] if where != Config().run else [])])
    if GIVEN in loaded.origins.values():  # by a program: nothing was typed, but the run has it
        run = loaded.path(loaded.config.run)
        return shlex.join([*words, "--config", str(run / RUN_CONFIG), "--out", str(run)])
    if loaded.file is not None and loaded.file != Path(FILE_NAME):
        words += ["--config", str(loaded.file)]
    model = loaded.config.model or ""
    is_path = loaded.path(model).exists()
    flags = {"--model": _typed(loaded, model) if is_path else model, "--seed": str(loaded.config.seed)}
    for origin in dict.fromkeys(loaded.origins.values()):
        if origin.startswith("--set "):
            words += ["--set", origin.removeprefix("--set ")]
        elif flags.get(origin):
            words += [origin, str(flags[origin])]
        elif origin == "--data":
            words += [
                word for source in loaded.config.data.sources for word in ("--data", _typed_source(loaded, source))
            ]
    return shlex.join(words)
