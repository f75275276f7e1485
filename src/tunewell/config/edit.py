"""Change keys in a config file, and leave its comments and the order of its lines as they are."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunewell.config.keys import format_key
from tunewell.config.load import LoadedConfig, load_config
from tunewell.config.yaml_reader import read_yaml
from tunewell.core.errors import UserError
from tunewell.core.files import read_text, write_atomic

_LINE = re.compile(r"^(\s*[\w-]+:)(?:\s+[^#\s][^#]*?)?(\s+#.*)?$")


def edit_config(loaded: LoadedConfig, changes: Mapping[str, Any]) -> Path:
    """Write dotted keys into the config file, and return its path. Raise UserError if that is not possible."""
    sets = " ".join(f"--set {key}={as_scalar(value)}" for key, value in changes.items())
    if loaded.file is None:
        raise UserError("there is no config file to change", fix=f"add to the command: `{sets}`")
    before = read_text(loaded.file)
    text = before
    for key, value in changes.items():
        text = set_key(text, key, value)
    write_atomic(loaded.file, text)
    try:
        again = load_config(loaded.file).config
        is_written = all(_value(again, key) == value for key, value in changes.items())
    except UserError:
        is_written = False
    if not is_written:
        write_atomic(loaded.file, before)
        raise UserError("the config file cannot be changed automatically", where=str(loaded.file), fix=f"set `{sets}`")
    return loaded.file


def set_key(text: str, key: str, value: Any, *, comment: str | None = None) -> str:
    """Return the text of a config with a key set. A new key is added to its section, a new section at the end.

    `comment` replaces the comment of a line that is changed.
    """
    lines, path = text.splitlines(), tuple(key.split("."))
    known = {format_key(found): number for found, number in read_yaml(text, "config").lines.items()}
    entry = f"{path[-1]}: {as_scalar(value)}"
    if key in known:
        at = known[key] - 1
        if not (matched := _LINE.match(lines[at])):
            raise UserError(f"`{key}` is not on a line of its own", fix=f"write `{entry}`")
        lines[at] = f"{matched[1]} {as_scalar(value)}{matched[2] or '' if comment is None else f'   # {comment}'}"
    elif len(path) == 1:
        lines.append(entry)
    elif path[0] in known:
        depth = next(depth for depth in range(len(path) - 1, 0, -1) if ".".join(path[:depth]) in known)
        section, at = ".".join(path[:depth]), known[".".join(path[:depth])]
        for name in reversed(path[depth:-1]):
            entry = f"{name}: {{{entry}}}"
        if not (header := re.match(rf"^(\s*){path[depth - 1]}:\s*(#.*)?$", lines[at - 1])):
            raise UserError(f"`{section}` is written on one line", fix=f"add `{entry}` to it")
        following = next((line for line in lines[at:] if line.strip() and not line.lstrip().startswith("#")), "")
        indent = re.match(r"\s*", following)
        is_inside = indent is not None and len(indent[0]) > len(header[1])
        lines.insert(at, f"{indent[0] if indent and is_inside else header[1] + '  '}{entry}")
    else:
        for name in reversed(path[1:-1]):
            entry = f"{name}: {{{entry}}}"
        lines += ["", f"{path[0]}:", f"  {entry}"]
    return "\n".join(lines) + "\n"


def as_scalar(value: Any) -> str:
    """Return a value as YAML on one line."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) else json.dumps(value)


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config
