"""The data sets of another tool as `data.sources`: paths, hub names, splits, columns and formats."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tunewell.config.schema import OPEN
from tunewell.core.errors import UserError
from tunewell.core.files import is_url, read_data
from tunewell.features.migrate.ledger import Entry, ForeignConfig, Setting, Status, as_dict, as_list, entry

_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|txt|md|arrow|xlsx|zip)(\.gz|\.zst)?$", re.I)
_HUB = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_SPLIT = re.compile(r"(\w[\w.-]*)(?:\[:(\d{1,12})\])?")
_LOADERS = ("json", "csv", "parquet", "text", "arrow", "pandas")
"""Names of `load_dataset` for files, which are in `data_files`."""


@cache
def tables() -> dict[str, Any]:
    """Return `config/foreign_rows.toml`."""
    from tunewell.config import foreign

    return read_data(foreign.__file__, "foreign_rows.toml")


def source_of(name: str, *, split: Any = None, config: Any = None, files: Any = None, revision: Any = None) -> Any:
    """Return one of our `data.sources` for a data set, and why a part of it is lost, or an empty text."""
    listed = [as_dict(files).get(str(split)) or next(iter(as_dict(files).values()), None)] if as_dict(files) else files
    paths = [one for one in as_list(listed) if isinstance(one, str)]
    path = paths[0] if paths and (name in _LOADERS or name in ("", "None")) else name
    lost = f"only the first of {len(paths)} files is read: name a folder or a glob" if len(paths) > 1 else ""
    source: dict[str, Any] = {"path": path or OPEN}
    limit = None
    if isinstance(split, str) and (parts := _SPLIT.fullmatch(split)):
        split, limit = parts[1], int(parts[2]) if parts[2] else None
    elif split is not None:
        split, lost = None, f"the split `{split}` is not read as such: the whole split `train` is"
    if not is_local(path):
        at = f"@{revision}" if isinstance(revision, str) else ""
        source["path"] = path if is_url(path) else f"hf://datasets/{path}{at}"
        source |= {key: value for key, value in (("config", config), ("split", split)) if isinstance(value, str)}
        if paths and path == name:
            source["path"] = f"hf://datasets/{path}{at}/{paths[0]}"
            source.pop("split", None)
    if limit:
        source["limit"] = limit
    return source, lost


def is_local(path: str) -> bool:
    """Return whether a data set is a file or a folder, and not a name on the hub."""
    return (
        bool(_FILE.search(path)) or path.startswith((".", "/", "~")) or Path(path).exists() or not _HUB.fullmatch(path)
    )


def read_axolotl_rows(foreign: ForeignConfig, setting: Setting, lines: Mapping[Any, int]) -> None:
    """Read `datasets`: a list of sections, each with an entry for every key."""
    for number, given in enumerate(as_list(setting.value)):
        one = as_dict(given) or {"path": given}
        kind = one.get("type")
        extra = {key: value for key, value in as_dict(kind).items() if key not in one}
        name = "user_defined" if extra else re.split(r"[.:]", str(kind))[0]
        known = tables()["axolotl"].get(name)
        if known and "refuse" in known:
            raise UserError(
                f"`type: {kind}` trains {known['refuse']}, which tunewell does not", where=f"line {setting.line}"
            )
        source, lost = source_of(
            str(one.get("path") or ""),
            split=one.get("split"),
            config=one.get("name"),
            files=one.get("data_files"),
            revision=one.get("revision"),
        )
        source |= {key: value for key, value in (known or {}).items() if value != "auto"}
        foreign.sources.append(source)
        for key, value in {**one, **extra}.items():
            here = (setting.name, number, key)
            line = lines.get(here) or lines.get((setting.name, number, "type", key), setting.line)
            at = Setting(f"{setting.name}[{number}].{key}", value, setting.file, line)
            if key == "type" and known is None:
                foreign.entries.append(entry(at, "lost", why="the format of the rows is found from their columns"))
            else:
                foreign.entries.append(_read_key(at, key, source, lost))


def _read_key(at: Setting, key: str, source: dict[str, Any], lost: str) -> Entry:
    """Return the entry of one key of a data set, and put its value into our source."""
    row = tables()["axolotl_keys"].get(key, {"lost": "tunewell has no such setting of a data set"})
    if at.value in (None, False, {}, []):
        return entry(at, "not needed", why="not set")
    if key == "path" or row.get("is_read"):
        if key == "split" and lost:
            return entry(at, "lost", why=lost)
        ours = {"path": f"path: {source['path']}", "type": _shown_format(source)}.get(key, f"in {source['path']}")
        return entry(at, "translated", f"data.sources: {ours}")
    if "column" in row and isinstance(at.value, str):
        if row["column"] != at.value:
            source.setdefault("columns", {})[row["column"]] = at.value
        return entry(at, "translated", f"data.sources: columns: {{{row['column']}: {at.value}}}")
    if row.get("is_template") and isinstance(at.value, str):
        own = tables()["templates"].get(at.value)
        if own:
            source["template"] = own
        why = "" if own else f"`{at.value}` is the template in the model's files"
        return entry(at, "translated", f"data.sources: template: {own or 'auto'}", why)
    if "key" in row:
        source[row["key"]] = at.value
        return entry(at, "translated", f"data.sources: {row['key']}: {at.value}")
    status: Status = "not needed" if "needless" in row else "lost"
    return entry(at, status, why=row.get("needless") or row.get("lost", "it cannot be read"))


def _shown_format(source: Mapping[str, Any]) -> str:
    parts = [f"{key}: {source[key]}" for key in ("format", "template") if key in source]
    return ", ".join(parts) or "the format is found from the columns"


def read_factory_rows(foreign: ForeignConfig, setting: Setting, info: Mapping[str, Any], folder: str) -> None:
    """Read LLaMA-Factory's `dataset: a,b`, with their entries in `dataset_info.json`."""
    names = [part for one in as_list(setting.value) for part in str(one).split(",")]
    missing: list[str] = []
    for name in map(str.strip, names):
        known = as_dict(info.get(name))
        columns = as_dict(known.get("columns"))
        if {"images", "videos", "audios"} & columns.keys() or "mllm" in name:
            raise UserError(f"`{name}` has images, video or audio, which tunewell does not train on")
        if known.get("ranking") or "kto_tag" in columns:
            raise UserError(f"`{name}` has preferences, which tunewell does not train on")
        file, hub = known.get("file_name"), known.get("hf_hub_url")
        if not known:
            missing.append(name)
        path = str(hub or Path(folder) / str(file or f"{name}.json"))
        source, _ = source_of(path, split=known.get("split"), config=known.get("subset"))
        if isinstance(known.get("num_samples"), int):
            source["limit"] = known["num_samples"]
        own = tables()["llama_factory_columns"]
        renamed = {own[key]: value for key, value in columns.items() if key in own and own[key] != value}
        if renamed and not known.get("formatting"):
            source |= {"columns": renamed, "format": "alpaca"}
        elif "messages" in columns and columns["messages"] not in ("messages", "conversations", "conversation"):
            source["columns"] = {"messages": columns["messages"]}
        foreign.sources.append(source)
    paths = ", ".join(str(source["path"]) for source in foreign.sources)
    guessed = f"without `dataset_info.json`, the files of {', '.join(missing)} are guessed" if missing else ""
    ours = f"data.sources: {paths}"
    foreign.entries.append(entry(setting, "translated", ours, f"{guessed}: name that file too" if guessed else ""))
