"""The data sets of another tool as `data.sources`: paths, hub names, splits, columns and formats."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunewell.config.foreign import translate
from tunewell.config.load import set_value
from tunewell.config.schema import OPEN
from tunewell.core.errors import UserError
from tunewell.features.migrate.ledger import (
    ForeignConfig,
    Setting,
    as_dict,
    as_list,
    fate,
    shown_value,
    tables,
    why_not,
)

_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|txt|md|arrow|xlsx|zip)(\.gz|\.zst)?$", re.I)
_HUB = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_SPLIT = re.compile(r"(\w[\w.-]*)(?:\[:(\d{1,12})\])?")
_LOADERS = ("json", "csv", "parquet", "text", "arrow", "pandas", "", "None")
"""Names of `load_dataset` for files, which are in `data_files`."""


def is_file(path: str) -> bool:
    """Return whether a path of a source is a file here. A hostile path, too long or with a null byte, is none."""
    with suppress(OSError, ValueError):
        return Path(path).is_file()
    return False


def _is_local(path: str) -> bool:
    is_path = path.startswith((".", "/", "~")) or not _HUB.fullmatch(path)
    with suppress(OSError, ValueError):
        return is_path or bool(_FILE.search(path)) or Path(path).exists()
    return True


def _source(facts: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return one of our `data.sources` for the keys of a data set, and why a part of it is lost, or an empty text."""
    name, split, files = str(facts.get("path") or ""), facts.get("split"), facts.get("data_files")
    if listed := as_dict(files):
        files = listed.get(str(split)) or next(iter(listed.values()))
    paths = [one for one in as_list(files) if isinstance(one, str)]
    path = paths[0] if paths and name in _LOADERS else name
    lost = f"only the first of {len(paths)} files is read: name a folder or a glob" if len(paths) > 1 else ""
    source: dict[str, Any] = {"path": path or OPEN}
    found = _SPLIT.fullmatch(split) if isinstance(split, str) else None
    if split is not None and found is None:
        lost = f"the split `{shown_value(split)}` is not read as such: the whole split `train` is"
    if path and not _is_local(path):
        at = f"@{facts['revision']}" if isinstance(facts.get("revision"), str) else ""
        source["path"] = f"hf://datasets/{path}{at}{f'/{paths[0]}' if paths else ''}"
        wanted = {"config": facts.get("name"), "split": found[1] if found and not paths else None}
        source |= {key: value for key, value in wanted.items() if isinstance(value, str)}
    return source | ({"limit": int(found[2])} if found and found[2] else {}), lost


def read_data_set(parts: list[Setting], foreign: ForeignConfig) -> None:
    """Add the source of a data set, and an entry for each of its keys."""
    facts = {part.name: part.value for part in parts if part.value not in (None, False, {}, [])}
    kind = re.split(r"[.:]", str(facts.get("type")))[0]
    known = tables()["formats"].get(kind)
    if known and "refuse" in known:
        where = f"{parts[0].file} line {parts[0].line}"
        raise UserError(f"`type: {kind}` trains {known['refuse']}, which tunewell does not", where=where)
    if any(part.name == "train_test_split" for part in parts) and facts.get("split") == "test":
        facts["split"] = "train"
    source, lost = _source(facts)
    source |= known or {}
    foreign.sources.append(source)
    for part in parts:
        if part.call != "[...]":
            _read_part(part, source, lost, foreign, is_known=known is not None)


def _read_part(part: Setting, source: dict[str, Any], lost: str, foreign: ForeignConfig, *, is_known: bool) -> None:
    """Put one key of a data set into our source."""
    rows = tables()["data_keys"]
    row = rows.get(part.name, {"lost": "tunewell has no such setting of a data set"})
    if "pattern" in row and (found := re.search(row["pattern"], str(part.value))):
        part = replace(part, value=int(found[1]))
    if part.value in (None, False, {}, []):
        foreign.add(part, "not needed", why="not set")
    elif row.get("is_function"):
        read_function(part, foreign)
    elif row.get("is_share"):
        foreign.own["data.held_out"] = part.value if isinstance(part.value, float) else 0.25
        foreign.add(part, "translated", f"data.held_out: {foreign.own['data.held_out']}")
    elif row.get("is_read"):
        why = lost if part.name in ("split", "data_files") else ""
        why = "the format of the rows is found from their columns" if part.name == "type" and not is_known else why
        about = {key: source[key] for key in ("format", "template") if key in source and part.name == "type"}
        shown = ", ".join(f"{key}: {value}" for key, value in (about or {"path": source["path"]}).items())
        foreign.add(part, "lost" if why else "translated", "" if why else f"data.sources: {shown}", why)
    else:
        status, own, why = fate(part, translate({part.name: part.value}, rows={part.name: row}), rows)
        for key, value in own.items():
            if problem := _invalid(key, value):
                status, own, why = "lost", {}, problem
            elif key != f"columns.{value}":
                least = min(value, source.get(key, value)) if key == "limit" else value
                set_value(source, tuple(key.split(".")), least)
        ours = ", ".join(f"{key}: {shown_value(value)}" for key, value in own.items())
        foreign.add(part, status, f"data.sources: {ours}" if own else "", why)


def _invalid(key: str, value: Any) -> str:
    """Return why a source does not take a value, or an empty text."""
    source: dict[str, Any] = {"path": "rows.jsonl"}
    set_value(source, tuple(key.split(".")), value)
    return why_not({"data": {"sources": [source]}})


def read_function(part: Setting, foreign: ForeignConfig) -> None:
    """Add the entry of a function over rows, by what its text does."""
    body = str(part.value)
    if "apply_chat_template" in body:
        foreign.add(part, "not needed", why="the chat template is applied in `prepare`")
    elif "truncation" in body or "input_ids" in body:
        foreign.add(part, "not needed", why="rows are tokenized in `prepare`")
    elif "###" in body or "alpaca" in body.lower():
        foreign.own["template.name"] = "alpaca"
        foreign.add(part, "translated", "template.name: alpaca", "its text is that of the Alpaca template")
    else:
        name = re.match(r"(?:async )?def (\w+)", body)
        named = f"`map: FILE.py:{name[1] if name else 'FUNCTION'}`"
        foreign.add(part, "lost", why=f"the function is not run: write it to a file, and set {named} on the source")
