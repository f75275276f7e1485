"""Columns of a comparison: who gets the prompts of a run, and who gets the questions as text."""

from types import SimpleNamespace
from typing import Any

import pytest

from tunewell.config.rules import VerdictRules
from tunewell.core.progress import silent
from tunewell.evaluation.questions import judge_by_task
from tunewell.features.compare import subjects
from tunewell.features.compare.measure import Exam
from tunewell.features.compare.subjects import ColumnSession, Subject
from tunewell.inference.batch import Replies
from tunewell.scoring.base import ReferenceRow


def ref_of(kind: str, plan: Any = None) -> Any:
    data, prices = SimpleNamespace(sources=()), SimpleNamespace(prices={})
    loaded = SimpleNamespace(config=SimpleNamespace(data=data, plan=prices))
    return SimpleNamespace(
        kind=kind, path=None, loaded=loaded, plan=plan, started_from=None, is_open_book=False, name=kind
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The first message that each model gets."""
    found: dict[str, Any] = {}

    def open_model(ref: Any, **_: Any) -> Any:
        return SimpleNamespace(ref=ref, notes=[], has_base=False, runtime=None, unload=lambda: None)

    def answerer(model: Any, *_: Any, **__: Any) -> Any:
        def answer(messages: list[Any], *_: Any) -> Replies:
            found[model.ref.kind] = messages[0]
            return Replies(["?"] * len(messages), [1], [1], 0.0)

        return SimpleNamespace(answer=answer)

    monkeypatch.setattr(subjects, "open_chat_model", open_model)
    monkeypatch.setattr(subjects, "ModelAnswerer", answerer)
    return found


def test_prompts_in_the_tokens_of_a_run_go_only_to_models_with_these_tokens(asked):
    """`compare MODEL RUN` gave the token ids of the run to the other model, because it was named first."""
    plan = SimpleNamespace(tokenizer_sha256="a", template_sha256s=["b"])
    model, run = ref_of("model"), ref_of("run", plan)
    questions = judge_by_task([ReferenceRow("When?", "In 1874.")], [], VerdictRules(task="facts"))
    session = ColumnSession(Exam(questions, [[5, 6, 7]], ref=run), [], device="cpu", progress=silent)
    for ref in (model, run):
        list(session.columns(Subject(ref.kind, ref, ref.kind)))
    assert asked == {"model": "When?", "run": [5, 6, 7]}
