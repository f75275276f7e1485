"""`tunewell notebook`: write a notebook for Colab that does the run of a config, from the rows to a GGUF file.

Its words and its code are in `notebook.md`; here they are chosen and filled in.
"""

import json
import os
import pprint
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tunewell
from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.presets import is_preset
from tunewell.core.redact import redact
from tunewell.integrations.colab import PACKAGE, MovedConfig, model_packages, move_config, requirement

_SECTION = re.compile(r"^<!-- ([a-z-]+) -->\n", re.MULTILINE)
_CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_KINDS = ("q8_0", "q4_k_m")
_METADATA: dict[str, Any] = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@dataclass(frozen=True)
class NotebookResult:
    """What was written, and what the person has to bring to it."""

    path: Path
    config: Path
    num_cells: int
    data: str
    """How the files get there: `upload`, `drive` or an address."""
    files: list[str]
    installs: list[str]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Give the object that `notebook --json` prints."""
        return {
            "notebook": str(self.path),
            "config": str(self.config),
            "cells": self.num_cells,
            "data": self.data,
            "files": self.files,
            "installs": self.installs,
            "notes": self.notes,
        }


def notebook(
    config: Path | None = None,
    *,
    out: Path | None = None,
    data: str = "upload",
    package: str | None = None,
    is_overwriting: bool = False,
) -> NotebookResult:
    """Write a notebook that brings the files, trains, judges, exports and hands over the result.

    `data` is `upload`, `drive` or an address; `package` is what pip installs in place of this version, or `none`.
    Raises UserError where one is there already, and for whatever the notebook is known to fail at.
    """
    path = out or Path("train.ipynb")
    if path.exists() and not is_overwriting:
        raise UserError(f"there is a `{path}` already", fix="use `--force` to replace it, or `--out` for another name")
    loaded = load_config(config)
    if loaded.file is None:
        raise UserError(f"there is no `{FILE_NAME}` here", fix="make one with `tunewell init DATA --model MODEL`")
    for key, value in (("model", loaded.config.model), ("data.sources", loaded.config.data.sources)):
        if not value:
            raise UserError(f"the config names no `{key}`", where=str(loaded.file), fix=f"see `tunewell explain {key}`")
    moved = move_config(loaded)
    notes = list(moved.notes)
    installs = [*requirement(package, notes), *model_packages(loaded)]
    values = {
        **_values(loaded, moved, notes),
        **_address(data, moved.files),
        "folder": repr(Path(os.path.relpath(loaded.base.resolve(), path.parent.resolve())).as_posix()),
        "install": "\n".join(_install_line(one) for one in installs),
    }
    cells = [cell for name in _sections(loaded, data, has_install=bool(installs)) for cell in _cells(name, values)]
    written = {"cells": cells, "metadata": _METADATA, "nbformat": 4, "nbformat_minor": 5}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    return NotebookResult(path, loaded.file, len(cells), data, moved.files, installs, notes)


def _sections(loaded: LoadedConfig, data: str, *, has_install: bool) -> list[str]:
    """Choose the sections of `notebook.md`, in their order."""
    model = str(loaded.config.model)
    is_hub = not (is_preset(model) or model.startswith(PACKAGE) or loaded.path(model).exists())
    way = data if data in ("upload", "drive") else "url"
    optional = [name for name, is_there in (("install", has_install), ("token", is_hub)) if is_there]
    middle = ["config", "files", way, "device", "train", "verdict", "export", "download"]
    return ["intro", "tools", *optional, *middle, "take-by-drive" if way == "drive" else "take-by-browser"]


def _values(loaded: LoadedConfig, moved: MovedConfig, notes: list[str]) -> dict[str, str]:
    """Write what differs between notebooks, as Python where it stands in code."""
    device, flags = loaded.config.device, ""
    if device not in ("auto", "cpu", "cuda"):
        notes.append(f"`device: {device}` is for this machine; the notebook trains on the best it finds")
        device, flags = "auto", '\n    "--device=auto",'
    kinds = loaded.config.export.gguf if loaded.origin("export.gguf") != "default" else _KINDS
    return {
        "model": Path(str(moved.config.model)).name.replace(PACKAGE, ""),
        "version": tunewell.__version__,
        "config": moved.text.rstrip("\n"),
        "files": pprint.pformat(moved.files, width=100),
        "device": repr(device),
        "run": repr(moved.config.run),
        "flags": flags,
        "kinds": repr(",".join(kinds)),
    }


def _address(data: str, files: list[str]) -> dict[str, str]:
    """Check where the files come from; an address must bring them all, and hold no secret."""
    if data in ("upload", "drive"):
        return {}
    parts = urllib.parse.urlsplit(data)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(
            f"`{data}` is no way to bring rows", where="--data", fix="`upload`, `drive` or an https address"
        )
    if redact(data) != data:
        raise UserError(
            "the address holds a secret, which everyone who gets the notebook could read",
            where="--data",
            fix="use `upload` or `drive`",
        )
    name = Path(urllib.parse.unquote(parts.path)).name
    is_archive = name.lower().endswith(".zip")
    if len(files) > 1 and not is_archive:
        raise UserError(
            f"the config needs {len(files)} files and the address brings one",
            where=", ".join(files),
            fix="put them into one `.zip` and name its address, or use `upload` or `drive`",
        )
    return {"address": repr(data), "target": repr(name if is_archive else Path(files[0]).name)}


def _install_line(requirement: str) -> str:
    words = ["--no-deps", requirement.removeprefix("--no-deps ")] if requirement.startswith("--") else [requirement]
    return f'run(sys.executable, "-m", "pip", "install", {", ".join(map(repr, words))}, advice=advice)'


def _cells(section: str, values: dict[str, str]) -> list[dict[str, Any]]:
    """Make a section's cells: its words, then its code."""
    parts = _SECTION.split((Path(__file__).parents[1] / "integrations" / "notebook.md").read_text(encoding="utf-8"))
    text = dict(zip(parts[1::2], parts[2::2], strict=True))[section]
    code = _CODE.search(text)
    words = _filled(_CODE.sub("", text), values)
    cells: list[dict[str, Any]] = []
    if words:
        cells.append({"cell_type": "markdown", "id": f"{section}-words", "metadata": {}, "source": words})
    if code:
        source = _filled(code[1], values)
        cell = {"cell_type": "code", "id": section, "metadata": {}, "source": source}
        cells.append(cell | {"execution_count": None, "outputs": []})
    return [cell | {"source": cell["source"].splitlines(keepends=True)} for cell in cells]


def _filled(text: str, values: dict[str, str]) -> str:
    # In one pass: a config may hold double braces of its own.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], text).strip("\n")
