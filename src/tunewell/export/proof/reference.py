"""What an export is held against: how the trained model reads the probes, what it computes and what it answers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.export.proof.checks import Logits
from tunewell.export.proof.tensors import Rows, Sketch, as_arrays, from_arrays
from tunewell.inference.generate import generate
from tunewell.models.attention import stock_attention
from tunewell.records.parity import ModelFacts, Question

ANSWER_TOKENS = 48
_MOST_BYTES = 64 * 2**20
_MOST_POSITIONS = 8
_PROBE, _ROUNDED = "probe-", "rounded/"
# A long text is read in fp32 by every artefact: at 2,560 tokens a model of 4 B takes minutes on a processor.
_LONG, _LONGEST, _BEYOND = 512, 2_560, 64


def probe_messages() -> list[list[dict[str, str]]]:
    """Give the conversations that every export is tried on: systems, turns, scripts, spaces, digits."""
    lines = files("tunewell.export.proof").joinpath("probes.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def long_length(config: PreTrainedConfig) -> tuple[int, str | None]:
    """Say how long the one long probe is to be, and what it leaves untried.

    Beyond a window, and beyond the length that positions were first trained for, models compute in another way.
    """
    text: Any = config.get_text_config()
    whole = getattr(text, "max_position_embeddings", None) or _LONGEST
    kinds, rope = getattr(text, "layer_types", None), getattr(text, "rope_parameters", None) or {}
    is_seen = kinds is None or "sliding_attention" in kinds
    turns = [getattr(text, "sliding_window", None) if is_seen else None]
    turns += [own.get("original_max_position_embeddings") for own in (rope, *rope.values()) if isinstance(own, dict)]
    turns.append(getattr(text, "original_max_position_embeddings", None))
    last = max((turn for turn in turns if turn and turn < whole), default=0)
    wanted = max(_LONG, last + _BEYOND if last else 0)
    length = min(wanted, _LONGEST, whole - ANSWER_TOKENS)
    untried = f"texts of more than {length:,} tokens were not tried: from {last:,} on this model computes otherwise"
    return length, untried if length <= last else None


def num_positions(num_probes: int, vocab_size: int) -> int:
    """Say how many positions of each probe are kept, so that their logits stay a few megabytes."""
    return int(min(_MOST_POSITIONS, max(1, _MOST_BYTES // max(1, num_probes * vocab_size * 4))))


@torch.no_grad()
def last_logits(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, number: int, progress: ProgressListener = silent
) -> list[Logits]:
    """Compute the logits of the last positions of each text, in fp32, one text at a time."""
    found = []
    with stock_attention(model):
        for place, ids in enumerate(prompts):
            progress(Progress("logits", place, len(prompts), "texts"))
            whole = torch.tensor([list(ids)], device=model.device)
            out = model(input_ids=whole, use_cache=False, logits_to_keep=number)
            found.append(out.logits[0, -number:].float().cpu().numpy())
    return found


def answer(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, stop_ids: Sequence[int], spell: Callable[[Any], str]
) -> list[Question]:
    """Let a model answer prompts, likeliest token by likeliest token."""
    if not prompts:
        return []
    done = generate(model, prompts, max_new_tokens=ANSWER_TOKENS, stop_ids=stop_ids, pad_id=min(stop_ids, default=0))
    return [
        Question(ids=list(ids), answer=one.ids, ended=one.ended, text=spell(one.ids))
        for ids, one in zip(prompts, done, strict=True)
    ]


@dataclass(frozen=True)
class Reference:
    """The numbers that an export is held against."""

    logits: list[Logits]
    """Of each probe."""
    sketches: dict[str, Sketch]
    """Of each tensor once merged; none in exports of tunewell before these were kept."""
    rounded: dict[str, Rows] = field(default_factory=dict)
    """Rows of the sketches of what rounding makes of a tensor, by `type/tensor`."""

    def save(self, path: Path) -> None:
        """Write the numbers into one file."""
        logits = {f"{_PROBE}{place:02d}": np.ascontiguousarray(rows) for place, rows in enumerate(self.logits)}
        rounded = {_ROUNDED + name: rows.astype(np.float32) for name, rows in self.rounded.items()}
        save_file(logits | as_arrays(self.sketches) | rounded, path)

    @classmethod
    def load(cls, path: Path, facts: ModelFacts | None) -> "Reference":
        """Read them again; raise UserError for a file that is missing or damaged."""
        try:
            arrays = load_file(path)
            logits = [arrays[name] for name in sorted(arrays) if name.startswith(_PROBE)]
            rounded = {name: rows for name, rows in arrays.items() if name.startswith(_ROUNDED)}
            return cls(
                logits,
                from_arrays(arrays, facts.shapes) if facts else {},
                {name.removeprefix(_ROUNDED): rows.astype(np.float64) for name, rows in rounded.items()},
            )
        except FileNotFoundError:
            raise UserError(f"`{path}` is missing: there is nothing to compare with") from None
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"`{path}` is damaged", where=str(error).splitlines()[0]) from error
