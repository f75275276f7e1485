"""`tunewell cache`: list what is kept outside of projects, with sizes, and delete it by kind."""

import shutil
from pathlib import Path
from typing import Annotated

from tunewell.cli.options import AsJson, Option
from tunewell.cli.render import emit, folded_table, hanging, json_text
from tunewell.core.cache import cache_folder
from tunewell.core.errors import UserError
from tunewell.core.units import size_bytes
from tunewell.model_files.checks import hub_cache

_KINDS = {
    "objects": "downloaded rows; downloaded again when needed",
    "base": "losses and answers of base models; measured again in the next verdict",
    "probes": "measured sizes of micro-batches; measured again by `plan` and long runs",
    "compiled": "compiled kernels, and which models compile; compiled again",
    "index": "vectors of passages; embedded again by `index`",
    "models": "what files of models contain; read again",
    "trials": "whether packages can be imported; tried again by `doctor`",
    "tokenizers": "tests of tokenizers; tested again",
    "hashes": "hashes of model files; computed again",
    "plugins": "what other packages add; read again",
}


def command(
    clear: Annotated[str | None, Option("Delete this kind, or `all` but models of the hub.", "KIND")] = None,
    json: AsJson = False,
) -> None:
    """Show what is kept on this disk outside of your projects, and delete it by kind."""
    root = cache_folder("")
    folders = {path.name: path for path in sorted(root.iterdir()) if path.is_dir()} if root else {}
    if clear is not None:
        if clear not in (*folders, "all"):
            raise UserError(f"nothing of the kind `{clear}` is kept", fix=f"use one of {', '.join(folders)}, all")
        for path in [own for name, own in folders.items() if clear in (name, "all")]:
            shutil.rmtree(path, ignore_errors=True)
    places = {name: (path, _KINDS.get(name, "")) for name, path in folders.items()}
    places["hub"] = (hub_cache(), "models of the hub, shared with other programs; `hf cache` deletes them")
    found = [(name, _size(path), str(path), about) for name, (path, about) in places.items()]
    if json:
        emit(json_text({"kinds": [dict(zip(("kind", "bytes", "path", "about"), own, strict=True)) for own in found]}))
        return
    emit(
        folded_table([[name, size_bytes(size), f"`{path}`: {about}"] for name, size, path, about in found], right=(1,))
    )
    emit(hanging("", "`tunewell cache --clear KIND` deletes a kind. Nothing in a project is kept here."))


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder; links, as in the hub cache, are not counted twice."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
