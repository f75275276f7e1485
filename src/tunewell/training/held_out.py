"""Look at held-out documents: their loss, and what the model answers to their questions."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tunewell.data.batches import TokenizedDocuments, make_batch, micro_batches, spread_evenly
from tunewell.training.events import Sample
from tunewell.training.step import TrainableModel

Answer = Callable[[list[list[int]]], list[tuple[list[int], bool]]]
"""From the ids of questions to the ids of answers, and whether each ended by itself."""
Spell = Callable[[list[int]], str]
_TO_COMPARE = 8
"""Prompts that are held side by side to see what they have in common."""


@dataclass(frozen=True)
class HeldOutLoss:
    """The mean loss over the supervised tokens of some documents."""

    loss: float
    tokens: int
    documents: int


def held_out_loss(learner: TrainableModel, split: TokenizedDocuments, *, budget: int, most: int | None) -> HeldOutLoss:
    """Compute the loss of some documents of a split, spread evenly; processes that train together share the work.

    Raises OutOfMemory, in all of them, where it does not fit in one; and what `learner.may_go_on` raises.
    """
    chosen = spread_evenly(len(split), most)
    lengths = np.asarray(split.index["length"], dtype=np.int64)
    learner.model.eval()
    wide = torch.float32 if learner.device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=wide, device=learner.device)
    tokens = 0
    with learner.fitting_everywhere(), torch.no_grad():
        for place, group in enumerate(micro_batches(chosen, lengths, budget)):
            batch = make_batch(split, group)
            tokens += len(batch.rows)
            learner.may_go_on()
            if place % learner.world.size == learner.world.rank:
                learner.faults.before_look(batch)
                total += learner.loss_sum(batch).to(wide)
    learner.world.add_up([total])
    return HeldOutLoss(float(total) / max(1, tokens), tokens, len(chosen))


@dataclass(frozen=True)
class Question:
    """What a held-out document asks, and what it says should be answered."""

    document: int
    ids: list[int]
    """Of the prompt: everything before the first learned token."""
    reference_ids: list[int]
    prompt: str
    text: str
    """The prompt without what all prompts have in common."""
    reference: str


def questions_of(split: TokenizedDocuments, *, number: int, spell: Spell) -> list[Question]:
    """Give the questions of some held-out documents; one that is learned from its first token on asks nothing."""
    found: list[tuple[int, list[int], list[int]]] = []
    for document in spread_evenly(len(split), max(number, _TO_COMPARE)).tolist():
        ids, labels = split.arrays(document)
        learned = np.flatnonzero(labels != -100)
        if not len(learned) or learned[0] <= 1:
            continue
        begin = int(learned[0])
        # Of several turns, the reference is the first: it ends where learning first stops.
        gap = np.flatnonzero(labels[begin:] == -100)
        end = begin + int(gap[0]) if len(gap) else len(ids)
        found.append((document, ids[:begin].tolist(), ids[begin:end].tolist()))
    prompts = [spell(prompt) for _, prompt, _ in found]
    made = zip(found, prompts, _without_frame(prompts), strict=True)
    questions = [
        Question(document, ids, reference, prompt, text, spell(reference).strip())
        for (document, ids, reference), prompt, text in made
    ]
    return [questions[place] for place in spread_evenly(len(questions), number).tolist()]


def ask(split: TokenizedDocuments, *, number: int, step: int, answer: Answer, spell: Spell) -> list[Sample]:
    """Answer the questions of some held-out documents."""
    questions = questions_of(split, number=number, spell=spell)
    answers = answer([question.ids for question in questions]) if questions else []
    return [
        Sample(step, own.document, own.prompt, own.text, spell(ids).strip(), own.reference, ended)
        for own, (ids, ended) in zip(questions, answers, strict=True)
    ]


def _without_frame(prompts: list[str]) -> list[str]:
    """Leave out what all prompts begin and end with: the system's words, and the markers around the question."""
    if len(set(prompts)) < 2:
        return prompts
    begin = _num_common(prompts)
    end = _num_common([prompt[begin:][::-1] for prompt in prompts])
    return [_whole_words(prompt, begin, len(prompt) - end) for prompt in prompts]


def _num_common(texts: list[str]) -> int:
    """Count the letters that all texts begin with."""
    first, last = min(texts), max(texts)
    return next((at for at, letter in enumerate(first) if letter != last[at]), len(first))


def _whole_words(prompt: str, begin: int, end: int) -> str:
    """Widen a stretch to whole words: questions may begin and end alike."""
    while begin > 0 and prompt[begin - 1].isalnum():
        begin -= 1
    while end < len(prompt) and not prompt[end].isspace() and prompt[end] != "<":
        end += 1
    return prompt[begin:end].strip()
