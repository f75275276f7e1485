"""`tunewell migrate`: write `tunewell.yaml` for the config, script or job of another tool, and account for its keys."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from tunewell.config.keys import format_key
from tunewell.config.load import FILE_NAME, load_config, respell_paths, set_value
from tunewell.config.schema import OPEN, Config
from tunewell.config.yaml_reader import read_yaml
from tunewell.core.errors import UserError
from tunewell.core.files import read_data, write_atomic
from tunewell.features.migrate.ledger import Migration, tables
from tunewell.features.migrate.read import read_files
from tunewell.features.migrate.translate import Draft, translate_config

_SECTIONS = tuple(Config.model_fields)


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
    tree: dict[str, Any] = {}
    for key in sorted(draft.tree, key=lambda key: _SECTIONS.index(key.partition(".")[0])):
        set_value(tree, tuple(key.split(".")), draft.tree[key])
    base = Path(os.path.relpath(Path.cwd(), path.parent.resolve()))
    if base != Path():
        tree = respell_paths("", tree, lambda text: text if text == OPEN else (base / text).as_posix())
    dumped = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=10**9)
    text = re.sub(r"(?m)^(?=\w)", "\n", dumped)
    lines = text.splitlines()
    for found, number in read_yaml(text, FILE_NAME).lines.items():
        key = format_key(found)
        if key in draft.comments and "\n" not in str(draft.tree.get(key)):
            lines[number - 1] += f"   # {' '.join(draft.comments[key].split())}"
    names = " ".join(", ".join(file.name for file in files).split())
    head = f"# Written by tunewell migrate from {names}. Every key: `tunewell explain`."
    return "\n".join([head, *lines]) + "\n"
