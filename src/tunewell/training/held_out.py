"""Held-out documents: their loss, their questions, and the model's sample answers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tunewell.data.batches import TokenizedDocuments, make_batch, micro_batches, spread_evenly
from tunewell.training.events import Sample
from tunewell.training.step import TrainableModel

Answer = Callable[[list[list[int]]], list[tuple[list[int], bool]]]
"""Token ids of prompts -> token ids of answers, and whether each ended by itself."""
Spell = Callable[[list[int]], str]
_TO_COMPARE = 8
"""Prompts that are compared to find their common frame."""


@dataclass(frozen=True)
class HeldOutLoss:
    """The mean loss over the supervised tokens of some documents."""

    loss: float
    tokens: int
    documents: int


def held_out_loss(learner: TrainableModel, split: TokenizedDocuments, *, budget: int, most: int | None) -> HeldOutLoss:
    """Return the loss of at most `most` documents of a split, evenly spread; the ranks share the work.

    Raises OutOfMemory on all ranks if one runs out of memory, and Interrupted if the run is asked to stop.
    """
    chosen = spread_evenly(len(split), most)
    lengths = np.asarray(split.index["length"], dtype=np.int64)
    learner.model.eval()
    wide = torch.float32 if learner.device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=wide, device=learner.device)
    tokens = 0
    with learner.sharing_out_of_memory(), torch.no_grad():
        for index, group in enumerate(micro_batches(chosen, lengths, budget)):
            batch = make_batch(split, group)
            tokens += len(batch.rows)
            learner.check_interrupt()
            if index % learner.world.size == learner.world.rank:
                learner.hooks.before_evaluation(batch)
                total += learner.loss_sum(batch).to(wide)
    learner.world.all_reduce([total])
    return HeldOutLoss(float(total) / max(1, tokens), tokens, len(chosen))


@dataclass(frozen=True)
class Question:
    """The question of a held-out document, and its reference answer."""

    document: int
    ids: list[int]
    """Of the prompt: everything before the first supervised token."""
    reference_ids: list[int]
    prompt: str
    text: str
    """The prompt without the frame that all prompts share."""
    reference: str


def questions_of(split: TokenizedDocuments, *, number: int, spell: Spell) -> list[Question]:
    """Return the questions of some held-out documents. A document supervised from its first token has none."""
    found: list[tuple[int, list[int], list[int]]] = []
    for document in spread_evenly(len(split), max(number, _TO_COMPARE)).tolist():
        ids, labels = split.arrays(document)
        supervised = np.flatnonzero(labels != -100)
        if not len(supervised) or supervised[0] <= 1:
            continue
        begin = int(supervised[0])
        # Of several turns, the reference is the first reply: it ends where supervision first stops.
        gap = np.flatnonzero(labels[begin:] == -100)
        end = begin + int(gap[0]) if len(gap) else len(ids)
        found.append((document, ids[:begin].tolist(), ids[begin:end].tolist()))
    prompts = [spell(prompt) for _, prompt, _ in found]
    rows = zip(found, prompts, _without_frame(prompts), strict=True)
    questions = [
        Question(document, ids, reference, prompt, text, spell(reference).strip())
        for (document, ids, reference), prompt, text in rows
    ]
    return [questions[index] for index in spread_evenly(len(questions), number).tolist()]


def ask(split: TokenizedDocuments, *, number: int, step: int, answer: Answer, spell: Spell) -> list[Sample]:
    """Answer the questions of some held-out documents."""
    questions = questions_of(split, number=number, spell=spell)
    answers = answer([question.ids for question in questions]) if questions else []
    return [
        Sample(step, own.document, own.prompt, own.text, spell(ids).strip(), own.reference, ended)
        for own, (ids, ended) in zip(questions, answers, strict=True)
    ]


def _without_frame(prompts: list[str]) -> list[str]:
    """Remove what all prompts begin and end with: the system prompt, and the markers around the question."""
    if len(set(prompts)) < 2:
        return prompts
    begin = _num_common(prompts)
    end = _num_common([prompt[begin:][::-1] for prompt in prompts])
    return [_whole_words(prompt, begin, len(prompt) - end) for prompt in prompts]


def _num_common(texts: list[str]) -> int:
    """Return the number of characters that all texts begin with."""
    first, last = min(texts), max(texts)
    return next((at for at, letter in enumerate(first) if letter != last[at]), len(first))


def _whole_words(prompt: str, begin: int, end: int) -> str:
    """Widen a slice to whole words: questions may begin and end alike."""
    while begin > 0 and prompt[begin - 1].isalnum():
        begin -= 1
    while end < len(prompt) and not prompt[end].isspace() and prompt[end] != "<":
        end += 1
    return prompt[begin:end].strip()
