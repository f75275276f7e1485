"""The content of a model: tensors, config and tokenizer. Used to detect whether a base model changed after training.

Copies, other shards and other file times of the same tensors are the same model. Every byte is hashed, but only once
on each machine as long as no file changes (`cached_by_stamp`).
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tunewell.core.cache import cached_by_stamp
from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, sha256_file, sha256_text, stable_json
from tunewell.core.units import count
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.model_files.files import WEIGHT_SUFFIXES, locate
from tunewell.model_files.presets import is_preset
from tunewell.model_files.weights import fingerprint_weights, weight_files
from tunewell.records.base_model import BaseContent
from tunewell.records.events import plain

_MAX_SHOWN = 3
_WITHOUT_EFFECT = ("transformers_version", "dtype", "torch_dtype", "use_cache", "pad_token_id", "attn_implementation")
"""Keys of a config that do not change what a model computes: tunewell chooses dtype and cache itself."""


def read_content(model: str) -> BaseContent:
    """Return the content of a model on this machine. It is empty for a preset, and for weights not downloaded yet."""
    if is_preset(model):
        return BaseContent()
    files = locate(model)
    weights = weight_files(model, files)

    def read() -> dict[str, Any]:
        tensors = {name: digest for path in weights for name, digest in _tensors(path).items()}
        content = {"weights": tensors, "config": plain(files.read_object("config.json"))}
        with suppress(UserError):  # the tokenizer is elsewhere
            found = load_tokenizer(model)
            words = stable_json([found.backend.get_vocab(with_added_tokens=True), found.special_tokens])
            # transformers adds a post-processor without effect, and each version of `tokenizers` may write other rules.
            rules = parse_json(found.backend.to_str()) | {"post_processor": found.backend.encode("a").ids}
            content["tokenizer"] = {
                f"vocabulary of `{found.kind}`": sha256_text(words),
                f"rules of `{found.kind}` (tokenizers {tokenizers.__version__})": sha256_text(stable_json(rules)),
            }
        return content

    paths = [*weights, *files.small.values(), *([files.sentencepiece] if files.sentencepiece else [])]
    return BaseContent.model_validate(cached_by_stamp("models", paths, read))


def _tensors(path: Path) -> dict[str, str]:
    """Return a hash of each tensor of a safetensors or torch file. A file of another format counts as one tensor."""
    if path.suffix == ".safetensors":
        return _digests(np.memmap(path, mode="r"))
    with suppress(Exception):  # a GGUF file, an old pickle, or a checkpoint with more than tensors
        import torch  # slow, and only a torch file needs it
        from safetensors.torch import save

        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True).items()
        found = (_digests(np.frombuffer(save({name: one.contiguous()}), np.uint8)) for name, one in tensors)
        return {name: digest for digests in found for name, digest in digests.items()}
    return {path.name: sha256_file(path)}


def _digests(data: np.ndarray[Any, Any]) -> dict[str, str]:
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = parse_json(data[8:start].tobytes())
    header.pop("__metadata__", None)

    def digest(entry: dict[str, Any]) -> str:
        first, last = entry["data_offsets"]
        found = hashlib.sha256(f"{entry['dtype']} {entry['shape']}".encode())
        found.update(data[start + first : start + last].data)
        return found.hexdigest()[:16]

    with ThreadPoolExecutor() as threads:
        return dict(zip(header, threads.map(digest, header.values()), strict=True))


def content_changes(model: str, before: BaseContent) -> list[str]:
    """Return how a model differs from its content at an earlier time, one line each."""
    with suppress(UserError, OSError, ValueError, TypeError, LookupError):  # loading reports a damaged model
        now = read_content(model)
        lines = [*_tensor_changes(before, now), *_config_changes(before.config, now.config)]
        parts = before.tokenizer.items() - now.tokenizer.items()
        lines += [f"the {part} changed" for part, _ in sorted(parts, reverse=True) if part in now.tokenizer][:1]
        if before.fingerprint and (found := fingerprint_weights(model)) not in (None, before.fingerprint):
            lines.append(f"its weights were {before.fingerprint[:16]}..., now they are {found[:16]}...")
        return lines
    return []


def cannot_compare(model: str, before: BaseContent) -> bool:
    """Return True if the weights cannot be compared with those of an earlier time: only one side is a file."""
    with suppress(UserError, OSError, ValueError, TypeError, LookupError):
        weights = read_content(model).weights
        return bool(before.weights and weights) and _is_file(before.weights) != _is_file(weights)
    return False


def _is_file(weights: dict[str, str]) -> bool:
    return any(Path(name).suffix in {*WEIGHT_SUFFIXES, ".gguf"} for name in weights)


def _tensor_changes(content: BaseContent, content_now: BaseContent) -> Iterator[str]:
    before, now = content.weights, content_now.weights
    if _is_file(before) != _is_file(now):
        return
    both, shared = before | now, {*before.values()} & {*now.values()}
    # Tied tensors are saved once or twice, and a file of another format may have another name.
    renamed = {name for name in before.keys() ^ now.keys() if both[name] in shared}
    changed = sorted(name for name in both.keys() - renamed if before.get(name) != now.get(name))
    if before and now and changed:
        names = ", ".join(f"`{name}`" for name in changed[:_MAX_SHOWN])
        old, new = (one.config.get("dtype") or one.config.get("torch_dtype") for one in (content, content_now))
        is_cast = old and new and old != new and len(changed) == len(both)
        yield (
            f"its weights are saved in {new}, and were in {old}"
            if is_cast
            else f"{len(changed):,} of {count(len(both), 'tensor')} changed: {names}"
        )


def _config_changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if not before or not now or before == now:
        return
    with suppress(Exception):  # a config that transformers does not know is compared as it is
        from transformers import AutoConfig  # slow, and only a config that was written again needs it

        # Each version of transformers writes the same settings with other keys.
        before, now = (_known(AutoConfig.for_model(**config)) for config in (before, now))
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in sorted(old | new):
        if old.get(key) != new.get(key):
            yield f"`{key}` in `config.json` is {new.get(key)}, not {old.get(key)}"


def _known(config: Any) -> dict[str, Any]:
    """Return the settings that the class of a config has. Other tools add keys that transformers ignores."""
    known = {*type(config)().to_dict(), "quantization_config", "rope_scaling"}
    return {key: value for key, value in config.to_dict().items() if key in known}


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in zip(map(str, config), config.values(), strict=True):
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif key not in _WITHOUT_EFFECT and not key.startswith("_"):
            is_one = key.endswith("_token_id") and isinstance(value, list) and len(value) == 1
            yield f"{prefix}{key}", value[0] if is_one else value
