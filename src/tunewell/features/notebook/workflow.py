"""`tunewell notebook`: write a Colab notebook that trains with a config, from the rows to a GGUF file.

The text and the code of the cells are in `integrations/notebook.md`. This module selects sections and fills them in.
"""

import json
import os
import pprint
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tunewell
from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.redact import redact
from tunewell.features.notebook.colab import PACKAGE, PortableConfig, make_portable, model_packages, requirement
from tunewell.model_files.presets import is_preset

_SECTION = re.compile(r"^<!-- ([a-z-]+)(?: if (\w+))? -->\n", re.MULTILINE)
"""The name of a section, and the value that must be true for it."""
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
    """Write a notebook that uploads the files, trains, tests, exports and downloads the result.

    `data` is `upload`, `drive` or a URL. `package` is installed by pip instead of this version; `none` installs
    nothing. Raises UserError if the notebook already exists or is certain to fail.
    """
    path = out or Path("train.ipynb")
    if path.exists() and not is_overwriting:
        raise UserError(
            f"`{path}` already exists", fix="overwrite it with `--force`, or choose another name with `--out`"
        )
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
    portable = make_portable(loaded)
    notes = list(portable.notes)
    installs = [*requirement(package, notes), *model_packages(loaded)]
    model = str(loaded.config.model)
    values: dict[str, Any] = {
        **_values(loaded, portable, notes),
        **_url_values(data, portable.files),
        "folder": repr(Path(os.path.relpath(loaded.base.resolve(), path.parent.resolve())).as_posix()),
        "install": "\n".join(_install_line(one) for one in installs),
        "is_hub": not (is_preset(model) or model.startswith(PACKAGE) or loaded.path(model).exists()),
        "is_upload": data == "upload",
        "is_drive": data == "drive",
        "is_url": data not in ("upload", "drive"),
        "is_taken_by_browser": data != "drive",
    }
    parts = _SECTION.split(Path(__file__).with_name("notebook.md").read_text(encoding="utf-8"))
    sections = zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    cells = [cell for name, wanted, text in sections if values.get(wanted, True) for cell in _cells(name, text, values)]
    written = {"cells": cells, "metadata": _METADATA, "nbformat": 4, "nbformat_minor": 5}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    return NotebookResult(path, loaded.file, len(cells), data, portable.files, installs, notes)


def _values(loaded: LoadedConfig, portable: PortableConfig, notes: list[str]) -> dict[str, str]:
    """Return the values for the placeholders of the template, as Python literals for code cells."""
    device, flags = loaded.config.device, ""
    if device not in ("auto", "cpu", "cuda"):
        notes.append(f"`device: {device}` is for this machine; the notebook uses the best device it finds")
        device, flags = "auto", '\n    "--device=auto",'
    kinds = loaded.config.export.gguf if loaded.origin("export.gguf") != "default" else _KINDS
    return {
        "model": Path(str(portable.config.model)).name.replace(PACKAGE, ""),
        "version": tunewell.__version__,
        "config": portable.text.rstrip("\n"),
        "files": pprint.pformat(portable.files, width=100),
        "device": repr(device),
        "run": repr(portable.config.run),
        "flags": flags,
        "kinds": repr(",".join(kinds)),
    }


def _url_values(data: str, files: list[str]) -> dict[str, str]:
    """Return the values for a download. Raise UserError if the URL is invalid, has a secret or has too few files."""
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
    return {"address": repr(data), "target": repr(name if is_archive else Path(files[0]).name)}


def _install_line(requirement: str) -> str:
    arguments = ["--no-deps", requirement.removeprefix("--no-deps ")] if requirement.startswith("--") else [requirement]
    return f'run(sys.executable, "-m", "pip", "install", {", ".join(map(repr, arguments))}, advice=advice)'


def _cells(section: str, text: str, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cells of a section: its text, then its code."""
    code = _CODE.search(text)
    cell: dict[str, Any] = {"metadata": {}}
    if markdown := _fill(_CODE.sub("", text), values):
        yield cell | {"cell_type": "markdown", "id": f"{section}-words", "source": markdown}
    if code:
        ran = {"execution_count": None, "outputs": []}
        yield cell | ran | {"cell_type": "code", "id": section, "source": _fill(code[1], values)}


def _fill(text: str, values: dict[str, Any]) -> list[str]:
    """Return the lines of a text with its values, in one pass, because the config may contain double braces."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], text).strip("\n").splitlines(keepends=True)
