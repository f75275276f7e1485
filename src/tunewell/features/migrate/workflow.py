"""`tunewell migrate`: write `tunewell.yaml` for the config, script or job of another tool, and account for its keys."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tunewell.config.edit import as_scalar
from tunewell.config.load import FILE_NAME, load_config, respell_paths
from tunewell.config.schema import OPEN
from tunewell.config.yaml_reader import read_yaml
from tunewell.core.errors import UserError
from tunewell.core.files import read_data, write_atomic
from tunewell.features.migrate.ledger import Migration, tables
from tunewell.features.migrate.read import read_files
from tunewell.features.migrate.translate import Draft, translate_config

_SECTIONS = ("model", "tokenizer", "run", "seed", "device", "track", "data", "template", "packing", "method", "train")


def migrate(
    files: Sequence[Path],
    *,
    out: Path | None = None,
    model: str | None = None,
    processes: int | None = None,
    is_overwriting: bool = False,
) -> Migration:
    """Write the config and return the ledger. Raise UserError if a file is not known, or the config exists."""
    path = out or Path(FILE_NAME)
    if path.resolve() in [file.resolve() for file in files]:
        raise UserError(f"`{path}` is the source", fix="name another file: `--out FILE`")
    if path.exists() and not is_overwriting:
        raise UserError(f"`{path}` already exists", fix="use `--force` to replace it, or `--out` for another name")
    foreign = read_files(files)
    draft = translate_config(foreign, processes=processes)
    if model is not None:
        draft.tree["model"] = model
        draft.comments["model"] = "as you said"
    draft.tree.setdefault("model", OPEN)
    draft.tree.setdefault("data.sources", [{"path": OPEN}])
    text = config_text(draft, path, files)
    load_config(cast(dict[str, Any], read_yaml(text, FILE_NAME).value))  # a mistake in a table would show
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    notes = [*draft.notes, *_open_points(draft)]
    name, entries = tables()["tools"][foreign.tool]["name"], list(dict.fromkeys(foreign.entries))
    traps = find_traps(foreign.tool, foreign.text)
    return Migration(name, path, text, entries, draft.defaults, notes, traps, draft.batch)


def _open_points(draft: Draft) -> list[str]:
    notes: list[str] = []
    if draft.tree.get("packing.long_documents") == "split":
        notes.append(
            "rows above the length limit are cut off there; here their rest is trained too (`long_documents: split`)"
        )
    if draft.tree["model"] == OPEN:
        notes.append("`model` is open: name one with `--model`, or in the config; `tunewell models ROWS` compares some")
    if any(source["path"] == OPEN for source in draft.tree["data.sources"]):
        notes.append("`data.sources` is open: name the file of the rows, here or after the source on the command line")
    return notes


def find_traps(tool: str, text: str) -> list[str]:
    """Return what tunewell does about each known trap of a source."""
    everything = text[:400_000]

    def occurs(pattern: str) -> bool:
        return re.search(pattern, everything, re.I) is not None

    known = [trap for trap in read_data(__file__, "traps.toml")["trap"] if tool in trap.get("tools", [tool])]
    found = [trap for trap in known if any(map(occurs, trap["any"]))]
    return [trap["say"] for trap in found if all(map(occurs, trap.get("all", ())))]


def config_text(draft: Draft, path: Path, files: Sequence[Path]) -> str:
    """Return the text of the config. Each line names the key of the source that it comes from."""
    names = ", ".join(file.name for file in files)
    lines = [f"# Written by tunewell migrate from {' '.join(names.split())}. Every key: `tunewell explain`.", ""]
    tree: dict[str, Any] = {}
    base = Path(os.path.relpath(Path.cwd(), path.parent.resolve()))
    for key, value in draft.tree.items():
        section, _, rest = key.partition(".")
        spelled = value if base == Path() else respell_paths(key, value, lambda text: (base / text).as_posix())
        if rest:
            tree.setdefault(section, {})[rest] = spelled
        else:
            tree[section] = spelled
    for section in sorted(tree, key=lambda name: _SECTIONS.index(name) if name in _SECTIONS else len(_SECTIONS)):
        if isinstance(tree[section], dict):
            lines += [f"{section}:", *_section(section, tree[section], draft.comments), ""]
        else:
            lines.append(f"{section}: {_scalar(tree[section])}{_comment(draft.comments, section)}")
            lines += [""] if section == "model" else []
    return "\n".join(lines).rstrip() + "\n"


def _section(section: str, values: Mapping[str, Any], comments: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        comment = _comment(comments, f"{section}.{name}")
        if name == "sources":
            lines.append("  sources:")
            for source in cast(list[dict[str, Any]], value):
                first, *rest = [f"{key}: {_scalar(one)}" for key, one in source.items()]
                lines += [f"    - {first}", *(f"      {line}" for line in rest)]
        elif "." in name:
            inner, _, last = name.partition(".")
            lines.append(f"  {inner}: {{{last}: {_scalar(value)}}}{comment}")
        else:
            lines.append(f"  {name}: {_scalar(value)}{comment}")
    return lines


def _comment(comments: Mapping[str, str], key: str) -> str:
    return f"   # {' '.join(comments[key].split())}" if key in comments else ""


def _scalar(value: Any) -> str:
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.10e}".partition("e")
        return f"{mantissa.rstrip('0')}{'0' if mantissa.rstrip('0').endswith('.') else ''}e{int(exponent)}"
    return as_scalar(value)
