"""Change keys in a config file, and leave its comments and the order of its lines as they are."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunewell.config.keys import all_keys, format_key, plain
from tunewell.config.load import LoadedConfig, load_config
from tunewell.config.yaml_reader import read_yaml
from tunewell.core.errors import UserError
from tunewell.core.files import read_text, write_atomic

_LINE = re.compile(r"^(\s*[\w-]+:)(?:\s+[^#\s][^#]*?)?(\s+#.*)?$")


def edit_config(loaded: LoadedConfig, changes: Mapping[str, Any]) -> Path:
    """Write dotted keys into the config file, and return its path. Raise UserError if that is not possible."""
    text = edited_text(loaded, changes)
    if loaded.file is None or text is None:
        what = "the config file cannot be changed automatically" if loaded.file else "there is no config file to change"
        sets = " ".join(f"--set {key}={as_scalar(value)}" for key, value in changes.items())
        raise UserError(what, where=str(loaded.file or ""), fix=f"add to the command: `{sets}`")
    write_atomic(loaded.file, text)
    return loaded.file


def edited_text(loaded: LoadedConfig, changes: Mapping[str, Any]) -> str | None:
    """Return the text of the config file with the changes and all else equal, or None if that is not possible."""
    if loaded.file is None:
        return None
    try:
        before = read_text(loaded.file)
        expected = load_config(loaded.file, [f"{key}={json.dumps(value)}" for key, value in changes.items()]).config
        text, keys = _make_room(before, load_config(loaded.file), changes)
        for key in keys:
            text = set_key(text, key, _value(expected, key))
        return text if load_config(loaded.file, text=text).config == expected else None
    except UserError:
        return None


def _make_room(text: str, own: LoadedConfig, changes: Iterable[str]) -> tuple[str, list[str]]:
    """Remove lines that set the changed keys in another form (`method: galore`, `optim: adamw`).

    Return the text, and the keys to set: those that are changed, and all that these lines set.
    """
    lines, written = text.splitlines(), {format_key(path): at for path, at in read_yaml(text, "config").lines.items()}
    moved: set[int] = set()
    for key in changes:
        section, _, last = key.rpartition(".")
        origin = own.origins.get(key, "")
        at = int(origin.rpartition(" line ")[2]) if " line " in origin else None
        if at and (written.get(key) != at or not re.match(rf"\s*{last}:", lines[at - 1])):
            moved.add(at)
        if (at := written.get(section)) and not re.match(rf"\s*{section.rpartition('.')[2]}:\s*(#.*)?$", lines[at - 1]):
            moved.add(at)
    origins = {f"{own.file} line {at}" for at in moved}
    kept = [key for key, origin in own.origins.items() if origin in origins and _is_value(key)]
    for at in sorted(moved, reverse=True):
        name = lines[at - 1].partition(":")[0]
        comment = matched[2] or "" if (matched := _LINE.match(lines[at - 1])) else ""
        is_section = name in all_keys() and all_keys()[name].is_section
        indent = " " * (len(name) - len(name.lstrip()))
        lines[at - 1 : at] = [f"{name}:{comment}"] if is_section else [indent + comment.strip()] if comment else []
    return "\n".join(lines) + "\n", list(dict.fromkeys([*kept, *changes]))


def _is_value(key: str) -> bool:
    return key in all_keys() and not all_keys()[key].is_section


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
    return plain(config)
