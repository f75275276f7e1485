"""Choose the rows a model is evaluated on: the held-out rows of its run, or rows of another corpus."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.data.corpus.reader import Corpus, Split, open_corpus
from tunewell.inference.model_ref import ModelRef
from tunewell.records.manifest import read_manifest


@dataclass(frozen=True)
class EvaluationSet:
    """Rows to evaluate a model on."""

    split: Split | None
    """None if there are no rows."""
    name: str
    notes: Sequence[str] = ()
    test_file: str | None = None
    """The user's file, if the rows come from one."""


def held_out_rows(model: ModelRef) -> EvaluationSet:
    """Return the held-out rows of a run; raise UserError if there are none that are certainly held out."""
    if model.corpus is not None:
        corpus = open_corpus(model.corpus)
        _require_same_corpus(model, corpus)
        return EvaluationSet(_held_out(corpus), "the held-out rows of the run")
    if model.kind == "run":
        raise UserError(
            f"the corpus `{model.loaded.config.corpus}` of the run does not exist any more",
            fix="validate on a file with `--data`, or build the corpus again with `tunewell prepare`",
        )
    is_log = model.path is not None and model.path.name in ("trainer_state.json", "events.jsonl")
    raise UserError(
        f"`validate` needs questions with answers to test `{model.name}`",
        where=f"`{model.name}` is a training log, not a model" if is_log else None,
        fix="name a run, an adapter or a model, and add `--data rows.jsonl`" if is_log else "add `--data rows.jsonl`",
    )


def rows_of_corpus(path: Path) -> EvaluationSet:
    """Return the held-out rows of a corpus."""
    return EvaluationSet(_held_out(open_corpus(path)), f"the held-out rows of {path}")


def rows_of_file(corpus: Corpus, name: str) -> EvaluationSet:
    """Return every row of a corpus made from the user's test file; a note counts the rows that were dropped."""
    manifest = corpus.manifest
    num_dropped = sum(manifest.dropped.values())
    kinds = ", ".join(f"{number} {kind}" for kind, number in manifest.dropped.items())
    dropped = f"{count(num_dropped)} of {count(manifest.rows_in, 'row')} could not be used: {kinds}"
    return EvaluationSet(corpus, name, [dropped] if num_dropped else [], test_file=name)


def shared_rows(model: ModelRef, other: ModelRef) -> tuple[Path | None, list[str]]:
    """Return the corpus on which two runs can be compared, with notes; None if each needs its own rows."""
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


def _require_same_corpus(model: ModelRef, corpus: Corpus) -> None:
    plan = model.plan
    if plan is not None and plan.corpus_sha256 != corpus.manifest.corpus_sha256:
        raise UserError(
            "the corpus has changed since the run: its held-out rows may have been trained on",
            where=str(corpus.path),
            fix="validate on a file with `--data`, or put the old corpus back",
        )
