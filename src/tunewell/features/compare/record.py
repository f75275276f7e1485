"""Ask a hosted model every question once, and keep its answers in a file that stands for it when it is gone.

Each answer is on disk before the next question is sent, so a killed process loses at most the one on its way.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.config.load import load_config
from tunewell.config.schema import SourceConfig
from tunewell.core.errors import UserError
from tunewell.core.files import FolderLock
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.remote_api import Unavailable
from tunewell.core.units import duration
from tunewell.data.question_rows import Question, read_questions
from tunewell.data.row_statistics import estimate_tokens
from tunewell.data.sources.base import split_limit
from tunewell.inference.chat_options import ChatOptions
from tunewell.inference.remote import RemoteChat
from tunewell.records.answers import header_of, is_begun, question_id, read_answers
from tunewell.records.events import EventLog
from tunewell.scoring.questions import answer_length
from tunewell.training.signals import Signals

_LEAST_TOKENS = 64
_SPARE = 2
"""The length limit in tokens is for twice the longest reference, because the tokens of the model are unknown."""
_FIRST_WAIT, _LONGEST_WAIT, _MAX_TRIES, _TICK = 1.0, 600.0, 8, 0.2


@dataclass(frozen=True)
class Recording:
    """The questions of some rows, and those of them that a file does not answer yet, by id."""

    path: Path
    address: str
    questions: dict[str, Question]
    open: dict[str, Question]

    @property
    def length(self) -> int:
        """Most tokens of an answer."""
        longest = max(estimate_tokens(one.reference) for one in self.questions.values())
        return answer_length(_SPARE * longest, least=_LEAST_TOKENS)

    @property
    def tokens(self) -> tuple[int, int]:
        """Estimated tokens of the open questions, and of answers as long as the references."""
        asked = self.open.values()
        return sum(estimate_tokens(one.text) for one in asked), sum(estimate_tokens(one.reference) for one in asked)


def plan_recording(path: Path, models: Sequence[str], data: Sequence[str]) -> Recording:
    """Return what is to be asked. Nothing is sent. Raises UserError if the file has the answers of another model."""
    if len(models) != 1 or not data:
        raise UserError(
            "`--record` needs one hosted model and its questions",
            fix=f"`tunewell compare --record {path} URL#MODEL --data rows.jsonl`",
        )
    RemoteChat(models[0], ChatOptions())  # raises UserError for an address without a model
    sources = load_config().config.data.sources
    like = sources[0].model_dump(exclude_unset=True) if sources else {}
    found: dict[str, Question] = {}
    for name, limit in map(split_limit, data):
        source = SourceConfig.model_validate(like | {"path": name, "limit": limit})
        found |= {question_id(asked.text): asked for asked in read_questions(source)}
    known: Collection[str] = ()
    if is_begun(path):
        recorded = read_answers(path)
        if (recorded.url, recorded.model) != _parts_of(models[0]):
            raise UserError(
                f"`{path}` has the answers of `{recorded.url}#{recorded.model}`",
                where=f"asked for `{models[0]}`",
                fix="name another file for this model",
            )
        known = recorded.answers
    return Recording(path, models[0], found, {own: asked for own, asked in found.items() if own not in known})


def record(plan: Recording, progress: ProgressListener = silent, *, owns_process: bool = False) -> int:
    """Ask the open questions and append each answer to the file. Return an exit code: not 0 after Ctrl-C.

    Raises UserError if the server fails for good; the answers so far are in the file, and the next call goes on.
    """
    if not plan.open:
        return 0
    options = ChatOptions(length=plan.length)
    lock = plan.path.with_name(f".{plan.path.name}.lock")
    plan.path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(FolderLock.take(lock, doing=f"recording answers in `{plan.path}`"))
        # Another process may have asked some questions since the plan was made.
        known = read_answers(plan.path).answers if is_begun(plan.path) else None
        log = stack.enter_context(EventLog(plan.path))
        signals = stack.enter_context(Signals(is_installed=owns_process))
        if known is None:
            log.append(header_of(*_parts_of(plan.address), max_tokens=options.length))
        for number, (own, asked) in enumerate(plan.open.items()):
            if own in (known or ()):
                continue
            progress(Progress("asking the model", number, len(plan.open), "questions"))
            try:
                answer = _asked(RemoteChat(plan.address, options), asked.text, signals, progress)
            except UserError as error:
                error.fix = f"the answers so far are in `{plan.path}`, and the same command goes on; {error.fix}"
                raise
            if answer is not None:
                log.append({"id": own, "question": asked.text, "reference": asked.reference, **answer})
                log.sync()
            if signals.exit_code is not None:
                return signals.exit_code
    return 0


def _parts_of(address: str) -> tuple[str, str]:
    url, _, model = address.partition("#")
    return url.rstrip("/"), model


def _asked(model: RemoteChat, text: str, signals: Signals, progress: ProgressListener) -> dict[str, Any] | None:
    """Return the answer of the model, or None after a signal. A busy server is asked again, as it wishes."""
    wait, tries = _FIRST_WAIT, 0
    while not signals.asked:
        began = time.monotonic()
        try:
            answer, end = model.whole_reply(text)
            return {"answer": answer, "end": end, "seconds": round(time.monotonic() - began, 3)}
        except Unavailable as error:
            tries += 1
            seconds = wait if error.wait_seconds is None else error.wait_seconds
            if tries == _MAX_TRIES or seconds > _LONGEST_WAIT:
                raise
            progress(Progress(f"{error.what}: waiting {duration(seconds)}"))
        until, wait = time.monotonic() + seconds, min(2 * wait, _LONGEST_WAIT)
        while time.monotonic() < until and not signals.asked:
            time.sleep(_TICK)
    return None
