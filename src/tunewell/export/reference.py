"""What an export is held against: how the trained model reads the probes, what it computes and what it answers."""

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tunewell.export.drift import Logits
from tunewell.models.attention import stock_attention
from tunewell.models.generate import generate
from tunewell.records.parity import Question

ANSWER_TOKENS = 48
_MOST_BYTES = 64 * 2**20
_MOST_POSITIONS = 8


def probe_messages() -> list[list[dict[str, str]]]:
    """Give the conversations that every export is tried on: systems, turns, scripts, spaces, digits."""
    lines = files("tunewell.export").joinpath("probes.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def num_positions(num_probes: int, vocab_size: int) -> int:
    """Say how many positions of each probe are kept, so that their logits stay a few megabytes."""
    return int(min(_MOST_POSITIONS, max(1, _MOST_BYTES // max(1, num_probes * vocab_size * 4))))


@torch.no_grad()
def last_logits(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, number: int, progress: Callable[[int, int], None]
) -> list[Logits]:
    """Compute the logits of the last positions of each text, in fp32, one text at a time."""
    found = []
    with stock_attention(model):
        for place, ids in enumerate(prompts):
            progress(place, len(prompts))
            out = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
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


def as_tensors(logits: Sequence[Logits]) -> dict[str, np.ndarray]:
    """Name the logits of each probe for a file."""
    return {f"probe-{place:02d}": np.ascontiguousarray(rows) for place, rows in enumerate(logits)}
