"""The rows of an evaluation: the held-out rows of the run, or rows of another corpus. No torch is imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.data.corpus.reader import Corpus, Split, open_corpus
from tunewell.inference.model_ref import ModelRef
from tunewell.records.manifest import read_manifest


@dataclass(frozen=True)
class EvaluationSet:
    """The rows on which a model is evaluated."""

    split: Split | None
    """The rows to evaluate, or None if there are no rows."""
    name: str
    notes: Sequence[str] = ()
    test_file: str | None = None
    """The user's file, if the rows come from one."""
    corpus: Corpus | None = None
    """The corpus of the rows, with the accepted answers of its rows and more references."""
    training: Split | None = None
    """The rows that the model was trained on, if they are known."""
    trained_on: int = 0
    """Number of rows that were left out, because the model was trained on them."""


def held_out_rows(model: ModelRef) -> EvaluationSet:
    """Return the held-out rows of a run; raise UserError if the corpus is missing or has changed since the run."""
    require_rows(model)
    assert model.corpus is not None
    corpus = open_corpus(model.corpus, verify=True)
    return EvaluationSet(_held_out(corpus), "the held-out rows of the run", corpus=corpus, training=corpus)


def require_rows(model: ModelRef) -> None:
    """Raise UserError if a model has no held-out rows of its own; only the manifest of the corpus is read."""
    if model.corpus is None:
        raise no_rows(model)
    if model.plan is not None and model.plan.corpus_sha256 != read_manifest(model.corpus).corpus_sha256:
        raise UserError(
            "the corpus has changed since the run: its held-out rows may have been used for training",
            where=str(model.corpus),
            fix="validate on a file with `--data`, or restore the old corpus",
        )


def no_rows(model: ModelRef) -> UserError:
    """Return the error for a model without held-out rows of its own."""
    if model.kind == "run":
        return UserError(
            f"the corpus `{model.loaded.config.corpus}` of the run no longer exists",
            fix="validate on a file with `--data`, or build the corpus again with `tunewell prepare`",
        )
    is_log = model.path is not None and model.path.name in ("trainer_state.json", "events.jsonl")
    return UserError(
        f"`validate` needs questions with answers to test `{model.name}`",
        where=f"`{model.name}` is a training log, not a model" if is_log else None,
        fix="name a run, an adapter or a model, and add `--data rows.jsonl`" if is_log else "add `--data rows.jsonl`",
    )


def rows_of_corpus(path: Path) -> EvaluationSet:
    """Return the held-out rows of a corpus."""
    corpus = open_corpus(path, verify=True)
    return EvaluationSet(_held_out(corpus), f"the held-out rows of {path}", corpus=corpus, training=corpus)


def rows_of_file(corpus: Corpus, name: str, *, model: ModelRef) -> EvaluationSet:
    """Return the rows of a corpus built from the user's test file that the model was not trained on, with notes."""
    manifest, notes = corpus.manifest, list[str]()
    if num_dropped := sum(manifest.dropped.values()):
        kinds = ", ".join(f"{count(number)} {kind}" for kind, number in manifest.dropped.items())
        notes.append(f"{count(num_dropped)} of {count(manifest.rows_in, 'row')} could not be used: {kinds}")
    training, split = _training_of(model), corpus
    known = _trained_on(corpus, training) if training is not None else np.zeros(len(corpus), dtype=bool)
    if num_known := int(known.sum()):
        notes.append(
            f"{count(num_known)} of {count(len(corpus), 'row')} are training rows of this model and were left out: "
            "they measure memorisation"
        )
        split = corpus.select(np.flatnonzero(~known))
    if num_known == len(corpus) and num_known:
        raise UserError(
            f"all {count(num_known, 'row')} of `{name}` are training rows of this model",
            fix="test on rows that were not used for training, or run `tunewell validate` without `--data`",
        )
    return EvaluationSet(split, name, notes, name, corpus, training, num_known)


def _training_of(model: ModelRef) -> Corpus | None:
    """Return the corpus of a run, or None if it is missing or has changed since."""
    if model.corpus is None or not model.corpus.is_dir():
        return None
    try:
        require_rows(model)
        return open_corpus(model.corpus)
    except UserError:
        return None


def _trained_on(corpus: Corpus, training: Corpus) -> npt.NDArray[np.bool_]:
    """Return for each document whether the training rows or the selection slice have it, by digests of whole rows."""
    if not len(training) or not len(corpus):
        return np.zeros(len(corpus), dtype=bool)
    splits = [split for split in (training, training.selection) if len(split)]
    known = {row.tobytes() for split in splits for row in split.digests[:, :2]}
    return np.array([row.tobytes() in known for row in corpus.digests[:, :2]], dtype=bool)


def shared_rows(model: ModelRef, other: ModelRef) -> tuple[Path | None, list[str]]:
    """Return the corpus on which two runs can be compared, with notes; None if each run needs its own rows."""
    if model.corpus is None:
        return None, []
    manifest = read_manifest(model.corpus)
    if other.corpus is not None and read_manifest(other.corpus).corpus_sha256 == manifest.corpus_sha256:
        return model.corpus, []
    plan, templates = other.plan, [template.sha256 for template in manifest.templates]
    if plan is not None and plan.tokenizer_sha256 == manifest.tokenizer.sha256 and plan.template_sha256s == templates:
        return model.corpus, [
            "the runs were trained on different rows; both are evaluated on the held-out rows of the first, which the "
            "second may have trained on"
        ]
    return None, ["the runs use different tokens or templates, so each is evaluated on its own held-out rows"]


def _held_out(corpus: Corpus) -> Split | None:
    return corpus.held_out if len(corpus.held_out) else None
