"""Write a merged model into a copy of its multimodal folder: text weights change, all others keep their bytes.

base    model.language_model.layers.0.mlp.up_proj.weight  ->  merged weight, in the chosen precision
        model.visual.blocks.0.attn.qkv.weight             ->  the same bytes, the same type
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tunewell.core.errors import UserError
from tunewell.model_files.families import table
from tunewell.model_files.shape import read_config
from tunewell.model_files.weights import weight_files

_INDEX = "model.safetensors.index.json"
_KEPT = ("*processor*.json", "chat_template.json")
"""Files of a multimodal folder that no text model has."""


@dataclass(frozen=True)
class MultimodalFolder:
    """A model folder whose text part was trained."""

    config: dict[str, Any]
    weight_files: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        return self.weight_files[0].parent

    def text_name(self, name: str) -> str:
        """Return the name in the text part of a weight in the folder's files."""
        for pattern, text in table()["text_parts"][self.config["model_type"]].items():
            if re.search(pattern, name):
                return re.sub(pattern, text, name)
        return name

    def names(self) -> dict[str, Path]:
        """Return the names of all weights, and their files."""
        names: dict[str, Path] = {}
        for path in self.weight_files:
            with safe_open(path, "pt") as opened:
                names |= dict.fromkeys(opened.keys(), path)
        return names


def find_multimodal_folder(base: str | None) -> MultimodalFolder | None:
    """Return the multimodal folder of a base model, or None if it is a text model or is not in safetensors files."""
    try:
        config, _ = read_config(base) if base else ({}, None)
        paths = weight_files(base) if base and config.get("model_type") in table()["text_parts"] else []
    except (UserError, OSError):
        return None
    is_usable = paths and all(path.suffix == ".safetensors" and path.is_file() for path in paths)
    return MultimodalFolder(config, tuple(paths)) if is_usable and not config.get("quantization_config") else None


def missing_names(base: MultimodalFolder, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the weights of the text part that the folder has under no name, e.g. experts stored in another layout."""
    return sorted(set(tensors) - {base.text_name(name) for name in base.names()})


def write_multimodal(
    base: MultimodalFolder, tensors: Mapping[str, torch.Tensor], folder: Path, dtype: torch.dtype
) -> None:
    """Write the folder, one weight file at a time, with `tensors` in place of the text weights."""
    folder.mkdir(parents=True, exist_ok=True)
    placed: dict[str, str] = {}
    total = 0
    for path in base.weight_files:
        written: dict[str, torch.Tensor] = {}
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                merged = tensors.get(base.text_name(name))
                written[name] = opened.get_tensor(name) if merged is None else merged.to(dtype).contiguous()
                total += written[name].nbytes
        save_file(written, folder / path.name, metadata={"format": "pt"})
        placed |= dict.fromkeys(written, path.name)
    if len(base.weight_files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    _write_config(base, tensors, folder, dtype)
    for pattern in _KEPT:
        for file in base.folder.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _write_config(
    base: MultimodalFolder, tensors: Mapping[str, torch.Tensor], folder: Path, dtype: torch.dtype
) -> None:
    precision = {"dtype": str(dtype).removeprefix("torch.")}
    config: dict[str, Any] = {key: value for key, value in base.config.items() if key != "torch_dtype"} | precision
    text = {key: value for key, value in config.get("text_config", {}).items() if key != "torch_dtype"} | precision
    text["vocab_size"] = len(tensors["model.embed_tokens.weight"])  # it may have new tokens
    if "vocab_size" in config:
        config["vocab_size"] = text["vocab_size"]
    written = json.dumps(config | {"text_config": text}, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(written + "\n", encoding="utf-8")


def changed_towers(base: MultimodalFolder, folder: Path, text: Mapping[str, Any]) -> list[str]:
    """Return the weights outside of the text part, with names as in `text`, that differ from those of the base."""
    changed: list[str] = []
    written = {path.name: path for path in folder.glob("*.safetensors")}
    for path in base.weight_files:
        with safe_open(path, "pt") as old, safe_open(written[path.name], "pt") as new:
            for name in old.keys():  # noqa: SIM118  not a dict
                if base.text_name(name) != name or name in text:
                    continue
                before, after = old.get_tensor(name), new.get_tensor(name)
                is_same = before.dtype == after.dtype and torch.equal(_bytes(before), _bytes(after))
                changed += [] if is_same else [name]
    return changed


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
