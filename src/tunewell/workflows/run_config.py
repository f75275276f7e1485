"""What repeats a run and what goes on with it: its config, written into its folder, and a command."""

import os
import shlex
from pathlib import Path

import yaml

from tunewell.config.load import FILE_NAME, Loaded
from tunewell.config.schema import Source
from tunewell.core.redact import redact


def config_of_run(loaded: Loaded) -> str:
    """Write the config down, every key that was set, with paths that hold from the run's folder."""
    config = loaded.config.model_dump(mode="json", exclude_unset=True, exclude={"run"})
    home = loaded.path(loaded.config.run)

    def seen(path: str) -> str:
        return path if Path(path).expanduser().is_absolute() else os.path.relpath(loaded.path(path), home)

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


def _spelled(source: Source) -> str:
    return source.path if source.limit is None else f"{source.path}#{source.limit}"


def resume_command(loaded: Loaded, *, allow_pickle: bool = False) -> str:
    """Give the command that goes on with this run, with whatever was said on the command line the first time."""
    words = ["tunewell", "train", "--resume", *(["--allow-pickle"] if allow_pickle else [])]
    if loaded.file is not None and loaded.file != Path(FILE_NAME):
        words += ["--config", str(loaded.file)]
    flags = {"--model": loaded.config.model, "--seed": str(loaded.config.seed)}
    for origin in dict.fromkeys(loaded.origins.values()):
        if origin.startswith("--set "):
            words += ["--set", origin.removeprefix("--set ")]
        elif flags.get(origin):
            words += [origin, str(flags[origin])]
        elif origin == "--data":
            words += [word for source in loaded.config.data.sources for word in ("--data", _spelled(source))]
    return shlex.join(words)
