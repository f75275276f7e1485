"""How many bytes an export takes, said and checked before the first is written."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.units import size_bytes
from tunewell.inference.chat_model import ChatModel

_BITS = {
    "fp32": 32.0,
    "fp16": 16.0,
    "bf16": 16.0,
    "f32": 32.0,
    "f16": 16.0,
    "q8_0": 8.5,
    # The mixtures keep some tensors in more bits than their name says, small models many of them; measured on
    # SmolLM2-135M: 8.2, 6.7 and 6.3 bits for each weight.
    "q6_k": 8.3,
    "q5_k_m": 6.7,
    "q4_k_m": 6.3,
}
_BY_LLAMA = frozenset({"q6_k", "q5_k_m", "q4_k_m"})
_BESIDE = 64 << 20
"""Tokenizers, cards, and what the proof is held against."""


@dataclass(frozen=True)
class Room:
    """What is going to be written."""

    stays: dict[str, int]
    """Bytes of each artefact."""
    on_the_way: int
    """Bytes that are there for a while and removed again."""
    free: int

    @property
    def needed(self) -> int:
        """Bytes that are there at once, at most."""
        return sum(self.stays.values()) + self.on_the_way + _BESIDE

    def __str__(self) -> str:
        each = ", ".join(f"{name} {size_bytes(size)}" for name, size in self.stays.items())
        more = f"; {size_bytes(self.on_the_way)} more while it is made" if self.on_the_way else ""
        return f"to be written: about {each}{more}; {size_bytes(self.free)} are free"


def estimate_disk_space(
    place: Path, voice: ChatModel, wanted: Sequence[str], kinds: Sequence[str], precision: str
) -> Room:
    """Count what will be written to a folder that exists."""
    weights = sum(parameter.numel() for parameter in voice.model.parameters())
    stays: dict[str, int] = {}
    on_the_way = 0
    if "adapter" in wanted and voice.adapter is not None:
        stays["adapter"] = voice.adapter.files(None).num_bytes
    if "merged" in wanted:
        stays[f"merged {precision}"] = _bytes(weights, precision)
    if {"gguf", "ollama"} & set(wanted):
        on_the_way = _bytes(weights, "fp32") * (2 if _BY_LLAMA & set(kinds) else 1)
        stays |= {f"gguf {kind}": _bytes(weights, kind) for kind in kinds}
        if "ollama" in wanted and not _has_links(place):
            stays["ollama"] = _bytes(weights, kinds[-1])
    return Room(stays, on_the_way, shutil.disk_usage(place).free)


def require_disk_space(room: Room, out: Path) -> None:
    """Raise UserError where the disk has less than will be needed."""
    if room.free < room.needed:
        raise UserError(
            f"the disk is too full: {size_bytes(room.needed - room.free)} are missing",
            where=f"`{out}`; {room}",
            fix="free as much, name another disk with `--out`, or fewer kinds with `--to` and `--gguf`",
        )


def _bytes(weights: int, kind: str) -> int:
    return int(weights * _BITS[kind] / 8)


def _has_links(place: Path) -> bool:
    """Try whether a file can have two names here: Ollama's GGUF then takes no room of its own."""
    one, other = place / ".one", place / ".other"
    try:
        one.touch()
        os.link(one, other)
    except OSError:
        return False
    finally:
        one.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
    return True
