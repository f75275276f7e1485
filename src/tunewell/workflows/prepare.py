"""`tunewell prepare`: from the rows a config names to a corpus that training can trust."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunewell import __version__
from tunewell.config.load import Given, Loaded, as_loaded
from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text, stable_json
from tunewell.core.progress import ProgressListener, silent
from tunewell.data.corpus.build import build
from tunewell.data.corpus.output import CorpusOutput
from tunewell.data.corpus.parts import PIPELINE_VERSION, Recipe
from tunewell.data.corpus.spec import NO_SHARE, BuildSpec, Job
from tunewell.data.rows.cleaning import CleanOptions
from tunewell.data.rows.formats import Converter
from tunewell.data.rows.functions import load_row_function
from tunewell.data.sources.blocks import ReadOptions
from tunewell.data.sources.files import SourceFile, find_files
from tunewell.data.text_pipeline import TextPipeline
from tunewell.models.facts import read_facts
from tunewell.records.manifest import Manifest, TokenizerRecord


@dataclass(frozen=True)
class PrepareResult:
    """What `prepare` made or found."""

    corpus: Path
    manifest: Manifest
    was_up_to_date: bool
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Give the object that `prepare --json` prints."""
        manifest = self.manifest
        return {
            "corpus": str(self.corpus),
            "up_to_date": self.was_up_to_date,
            "rows_read": manifest.rows_read,
            "rows_in": manifest.rows_in,
            "documents": manifest.documents,
            "held_out": manifest.held_out,
            "pieces": manifest.pieces,
            "repeats": manifest.repeats,
            "dropped": manifest.dropped,
            "notes": manifest.notes,
            "tokens": manifest.tokens.model_dump(),
            "boundary_tokens": manifest.boundary_tokens,
            "packing": manifest.packing.model_dump(),
            "lengths": manifest.lengths.model_dump(exclude={"histogram"}),
            "sources": [source.model_dump() for source in manifest.sources],
            "corpus_sha256": manifest.corpus_sha256,
            "seconds": round(self.seconds, 3),
        }


def prepare(
    config: Given = None,
    *,
    sets: Sequence[str] = (),
    model: str | None = None,
    data: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    progress: ProgressListener = silent,
) -> PrepareResult:
    """Make the corpus a config describes, or find that it is there already.

    Raises UserError for whatever the user can mend; an existing corpus stays as it was until the new one is whole.
    """
    started = time.perf_counter()
    config = as_loaded(config, sets, model=model, data=data, out=out)
    order = plan_order(config, progress)
    target = config.path(config.config.corpus)
    place = CorpusOutput(target)
    manifest = None if place.has_leftovers() else place.up_to_date(order)
    if manifest is not None:
        return PrepareResult(target, manifest, True, time.perf_counter() - started)
    place.refuse_foreign()
    with place.held():
        found = place.up_to_date(order)  # an old one may have come back, or another process may just have made it
        manifest = found or build(order, out=place.home, work=place.work)
    return PrepareResult(target, manifest, found is not None, time.perf_counter() - started)


def plan_order(loaded: Loaded, progress: ProgressListener = silent) -> BuildSpec:
    """Resolve everything a config names: model, templates, files; nothing is read of the rows but their hash."""
    config, base = loaded.config, loaded.base
    if config.model is None:
        raise UserError(
            "no model is named, so there is no tokenizer",
            fix="add `model:` to the config or `--model` to the command: a folder, a `.gguf` file or a hub id",
        )
    if not config.data.sources:
        raise UserError("no data is named", fix="add `data.sources` to the config, or `--data FILE` to the command")
    tools = TextPipeline.load(loaded)
    found: list[tuple[int, SourceFile]] = []
    if isinstance(config.data.held_out, str):
        found += [(-1, file) for file in find_files(config.data.held_out, base=base)]
    for index, source in enumerate(config.data.sources):
        found += [(index, file) for file in find_files(source.path, base=base)]
    found = _with_distinct_names(found)
    recipes = {index: _recipe(loaded, tools, index) for index, _ in found}
    jobs = [
        Job(
            file,
            _named(recipes[index], file.name),
            stamp=file.source.stamp(),
            sha256=file.sha256(),
            source_index=index,
            is_held_out=index < 0,
        )
        for index, file in found
    ]
    settings = _portable(config.model_dump(mode="json", include={"data", "template", "packing", "seed"}), base)
    limit = read_facts(tools.model).context_limit
    inputs = [str(PIPELINE_VERSION), stable_json(settings), str(limit), tools.tokenizer.sha256]
    inputs += [f"{job.file.name} {job.sha256} {job.recipe.key()} {job.source_index}" for job in jobs]
    return BuildSpec(
        jobs=jobs,
        held_out_share=0.0 if isinstance(config.data.held_out, str) else config.data.held_out,
        drop_duplicates=config.data.clean.exact_duplicate == "drop",
        drop_answers_held_out=config.data.clean.answer_in_held_out == "drop",
        context_length=config.packing.context_length,
        context_limit=limit,
        long_documents=config.packing.long_documents,
        shares=_shares(loaded),
        max_repeats=config.data.max_repeats,
        made_by=f"tunewell {__version__}",
        inputs_sha256=sha256_text(*inputs),
        config=settings,
        tokenizer=TokenizerRecord(
            source=_named_source(tools, str(config.tokenizer or config.model)),
            kind=tools.tokenizer.kind,
            sha256=tools.tokenizer.sha256,
            vocab_size=tools.tokenizer.vocab_size,
            special_tokens=tools.tokenizer.special_tokens,
            added_by_us=list(tools.tokenizer.added_by_us),
        ),
        templates=[record.model_copy(update={"name": _without_place(record.name, base)}) for record in tools.records()],
        save_tokenizer=tools.save,
        progress=progress,
    )


def _recipe(loaded: Loaded, tools: TextPipeline, index: int) -> Recipe:
    """Say how the rows of one source become documents; -1 stands for the held-out file, read like the first source."""
    config = loaded.config
    source = (
        config.data.sources[index]
        if index >= 0
        else config.data.sources[0].model_copy(update={"limit": None, "share": None})
    )
    clean = config.data.clean
    masker = tools.masker(source)
    read = ReadOptions(clean.max_row_bytes, clean.max_nesting, source.text_rows, source.encoding, source.limit)
    function = load_row_function(source.map, batch=source.map_batch, base=loaded.base) if source.map else None
    settings = {
        "source": source.model_dump(mode="json", exclude={"path", "share", "limit", "map", "template"}),
        "clean": clean.model_dump(
            mode="json", include={"bad_text", "min_reply_chars", "drop_urls", "max_nesting", "bad_rows"}
        ),
        "learn": [masker.rule.learn_from, *masker.rule.roles] if masker else [],
    }
    return Recipe(
        source=source.path,
        read=read,
        converter=Converter(format_name=source.format, columns=source.columns, system=source.system),
        cleaning=CleanOptions(clean.bad_text, clean.min_reply_chars, clean.drop_urls),
        masker=masker,
        encoder=tools.encoder(masker),
        row_function=function,
        bad_rows=clean.bad_rows,
        settings=settings,
    )


def _named(recipe: Recipe, name: str) -> Recipe:
    return Recipe(**{**recipe.__dict__, "source": name})


def _with_distinct_names(found: list[tuple[int, SourceFile]]) -> list[tuple[int, SourceFile]]:
    """Number files that have one name but lie in different folders, so that a ledger can tell them apart."""
    seen: dict[str, int] = {}
    renamed = []
    for index, file in found:
        seen[file.name] = seen.get(file.name, 0) + 1
        name = file.name if seen[file.name] == 1 else f"{file.name} ({seen[file.name]})"
        renamed.append((index, replace(file, name=name)))
    return renamed


def _named_source(tools: TextPipeline, name: str) -> str:
    """Name where the tokenizer came from, without the place that it has on this machine."""
    return Path(tools.model).name if Path(tools.model).is_absolute() or Path(name).is_absolute() else name


def _shares(loaded: Loaded) -> dict[int, float]:
    """Give each source's share by its index; those without one divide what is left by their size, as index -2."""
    shares = {index: source.share for index, source in enumerate(loaded.config.data.sources)}
    given = {index: share for index, share in shares.items() if share is not None}
    if given and len(given) < len(shares):
        given[NO_SHARE] = 1 - sum(given.values())
    return given


def _portable(settings: dict[str, Any], base: Path) -> dict[str, Any]:
    """Cut absolute paths down to what is the same on every machine, so that equal rows give equal bytes."""
    data, template = settings["data"], settings["template"]
    sources = [
        source | {key: _without_place(source[key], base) for key in ("path", "map", "template")}
        for source in data["sources"]
    ]
    return settings | {
        "data": data | {"sources": sources, "held_out": _without_place(data["held_out"], base)},
        "template": template | {"name": _without_place(template["name"], base)},
    }


def _without_place(value: Any, base: Path) -> Any:
    if not isinstance(value, str) or not Path(value).expanduser().is_absolute():
        return value
    path, home = Path(value).expanduser(), base.resolve()
    return path.relative_to(home).as_posix() if path.is_relative_to(home) else path.name
