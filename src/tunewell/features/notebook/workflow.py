"""`tunewell notebook`: write a Colab notebook that trains with a config, from the rows to a GGUF file.

`notebook.ipynb` has all cells. This module leaves out those that are not needed, and fills in the settings and the
config.
"""

import json
import os
import pprint
import urllib.parse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tunewell
from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_bytes, write_atomic
from tunewell.core.redact import redact
from tunewell.features.notebook.colab import PACKAGE, make_portable, model_packages, requirement
from tunewell.model_files.presets import is_preset

_KINDS = ("q8_0", "q4_k_m")


@dataclass(frozen=True)
class NotebookResult:
    """The written notebook, with the files and packages that it needs."""

    path: Path
    config: Path
    num_cells: int
    data: str
    """How the files are transferred to Colab: `upload`, `drive` or a URL."""
    files: list[str]
    installs: list[str]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `notebook --json` prints."""
        found = {**asdict(self), "config": str(self.config)}
        return {"notebook": str(found.pop("path")), "cells": found.pop("num_cells"), **found}


def notebook(
    config: Path | None = None,
    *,
    out: Path | None = None,
    data: str = "upload",
    package: str | None = None,
    is_overwriting: bool = False,
) -> NotebookResult:
    """Write a notebook that uploads the files, trains, tests, exports and downloads the result.

    `data` is `upload`, `drive` or a URL. `package` is installed by pip instead of this version; `none` installs
    nothing. Raises UserError if the notebook already exists or is certain to fail.
    """
    path = out or Path("train.ipynb")
    if path.exists() and not is_overwriting:
        raise UserError(
            f"`{path}` already exists", fix="overwrite it with `--force`, or choose another name with `--out`"
        )
    loaded = _load(config)
    portable = make_portable(loaded)
    notes = list(portable.notes)
    installs = [*requirement(package, notes), *model_packages(loaded)]
    model, device = str(loaded.config.model), loaded.config.device
    if is_other_device := device not in ("auto", "cpu", "cuda"):
        notes.append(f"`device: {device}` is for this machine; the notebook uses the best device it finds")
    kinds = loaded.config.export.gguf if loaded.origin("export.gguf") != "default" else _KINDS
    settings = {
        "tunewell": tunewell.__version__,
        "model": Path(str(portable.config.model)).name.replace(PACKAGE, ""),
        "install": [one.split(" ", 1) if one.startswith("--") else [one] for one in installs],
        "files": portable.files,
        "folder": Path(os.path.relpath(loaded.base.resolve(), path.parent.resolve())).as_posix(),
        **_url_settings(data, portable.files),
        "device": "auto" if is_other_device else device,
        "flags": ["--device=auto"] if is_other_device else [],
        "run": portable.config.run,
        "gguf": ",".join(kinds),
    }
    wanted = {data if data in ("upload", "drive") else "url", None}
    wanted |= {"browser"} if data != "drive" else set()
    wanted |= {"install"} if installs else set()
    is_local = is_preset(model) or model.startswith(PACKAGE) or loaded.path(model).exists()
    wanted |= set() if is_local else {"hub"}
    written = parse_json(read_bytes(Path(__file__).with_name("notebook.ipynb")))
    cells = written["cells"] = [cell for cell in written["cells"] if cell["metadata"].pop("if", None) in wanted]
    by_id = {cell["id"]: cell for cell in cells}
    by_id["settings"]["source"] = f"SETTINGS = {pprint.pformat(settings, width=100, sort_dicts=False)}"
    by_id["config"]["source"] += portable.text.rstrip("\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    return NotebookResult(path, Path(str(loaded.file)), len(cells), data, portable.files, installs, notes)


def _load(config: Path | None) -> LoadedConfig:
    loaded = load_config(config)
    if loaded.file is None:
        raise UserError(
            f"there is no `{FILE_NAME}` here", fix="write one with `tunewell init FILE`, where FILE has your rows"
        )
    for key, value in (("model", loaded.config.model), ("data.sources", loaded.config.data.sources)):
        if not value:
            raise UserError(
                f"`{key}` is not set in the config", where=str(loaded.file), fix=f"see `tunewell explain {key}`"
            )
    return loaded


def _url_settings(data: str, files: list[str]) -> dict[str, str]:
    """Return the settings of a download. Raise UserError if the URL is invalid, has a secret or has too few files."""
    if data in ("upload", "drive"):
        return {}
    parts = urllib.parse.urlsplit(data)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(
            f"`{data}` is not `upload`, `drive` or a URL", where="--data", fix="use `upload`, `drive` or an https URL"
        )
    if redact(data) != data:
        raise UserError(
            "the URL contains a secret, which everyone with the notebook could read",
            where="--data",
            fix="use `upload` or `drive`",
        )
    name = Path(urllib.parse.unquote(parts.path)).name
    is_archive = name.lower().endswith(".zip")
    if len(files) > 1 and not is_archive:
        raise UserError(
            f"the config needs {len(files)} files, but the URL is one file",
            where=", ".join(files),
            fix="put them into one `.zip` file, or use `upload` or `drive`",
        )
    return {"url": data, "target": name if is_archive else Path(files[0]).name}
