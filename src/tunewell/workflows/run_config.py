"""What repeats a run and what goes on with it: its config, written into its folder, and a command."""

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tunewell.config.given import GIVEN
from tunewell.config.load import FILE_NAME, Given, Loaded, as_loaded, load_config
from tunewell.config.overrides import relative
from tunewell.config.schema import Config, Source
from tunewell.core.redact import REDACTED, redact
from tunewell.records.rundir import RUN_CONFIG


def load_for_run(given: Given, sets: Sequence[str] = (), *, is_resuming: bool, **flags: Any) -> Loaded:
    """Load a config to train by; a run that goes on has its own, which counts where no other is there or named."""
    loaded = as_loaded(given, sets, **flags)
    is_bare = given is None or given == ""
    if not (is_resuming and is_bare and loaded.file is None and loaded.config.model is None):
        return loaded
    folder = loaded.path(loaded.config.run)
    own = folder / RUN_CONFIG
    if not own.is_file():
        return loaded
    sets = [sets] if isinstance(sets, str) else sets
    return load_config(own, [*sets, f"run={json.dumps(str(folder), ensure_ascii=False)}"], **flags)


def config_of_run(loaded: Loaded) -> str:
    """Write the config down, every key that was set, with paths that hold from the run's folder."""
    config = loaded.config.model_dump(mode="json", exclude_unset=True, exclude={"run"})
    home = loaded.path(loaded.config.run)

    def seen(path: str) -> str:
        return path if Path(path).expanduser().is_absolute() else relative(loaded.path(path), home)

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
    return yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True)


def _goes_on_by_its_own(loaded: Loaded) -> bool:
    """Say whether `load_for_run` finds the run's config by its folder alone, with nothing taken out of it."""
    is_alone = loaded.file is None or loaded.file == loaded.path(loaded.config.run) / RUN_CONFIG
    return is_alone and not Path(FILE_NAME).exists() and REDACTED not in config_of_run(loaded)


def _typed(loaded: Loaded, path: str) -> str:
    """Spell a path from the command line as it was typed in the current folder; the config has it from its own."""
    is_relative = "://" not in path and not path.startswith("~") and not Path(path).is_absolute()
    return os.path.relpath(loaded.path(path)) if is_relative and loaded.base != Path() else path


def _typed_source(loaded: Loaded, source: Source) -> str:
    path = _typed(loaded, source.path)
    return path if source.limit is None else f"{path}#{source.limit}"


def resume_command(loaded: Loaded, *, allow_pickle: bool = False) -> str:
    """Give the command that goes on with this run, with whatever was said on the command line the first time.

    It is to be given in the folder where that was.
    """
    words = ["tunewell", "train", "--resume", *(["--allow-pickle"] if allow_pickle else [])]
    if GIVEN in loaded.origins.values():  # by a program: nothing was typed, but the run has it
        run = loaded.path(loaded.config.run)
        return shlex.join([*words, "--config", str(run / RUN_CONFIG), "--out", str(run)])
    if _goes_on_by_its_own(loaded):
        run = str(_typed(loaded, loaded.config.run))
        return shlex.join([*words, *(["--out", run] if run != Config().run else [])])
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
