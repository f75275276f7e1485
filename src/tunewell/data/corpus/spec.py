"""The build spec of a corpus: its files, its row pipelines, and every setting that affects the result."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from tunewell.config.load import LoadedConfig, other_configs, with_changes
from tunewell.config.open_points import require_no_open_points
from tunewell.config.schema import Config, Data, Packing
from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text, stable_json
from tunewell.core.progress import ProgressListener, silent
from tunewell.core.units import count, listed
from tunewell.core.version import made_by
from tunewell.data.corpus.tokenized_block import PIPELINE_VERSION, RowPipeline
from tunewell.data.rows.classification import labels_of, with_found_labels
from tunewell.data.rows.formats import Converter, FormatOptions
from tunewell.data.rows.functions import load_row_function
from tunewell.data.sources.base import (
    TOKENIZED,
    UNREADABLE,
    SourceFile,
    SourceOptions,
    detect_format,
    find_files,
    is_url,
)
from tunewell.data.sources.blocks import ReadOptions, parsed_rows
from tunewell.data.sources.local import outside_links, unread_files
from tunewell.data.text_pipeline import TextPipeline
from tunewell.records.manifest import TemplateRecord, TokenizerRecord
from tunewell.records.plan import Chosen

HELD_OUT_FILE = -1
"""Source index of the held-out file."""
NO_SHARE = -2
"""Source index of all sources without a `share`."""
_NUM_ADVISED, _NUM_NAMED = 2, 3


@dataclass
class Job:
    """One file to read, with its row pipeline and the source in the config."""

    file: SourceFile
    pipeline: RowPipeline
    identity: str
    """The version of a remote file, which is known before the download, else the SHA-256."""
    source_index: int
    is_held_out: bool = False
    stamp: str | None = None
    """`Source.stamp()` at the time of hashing. If the file changes during the build, an error is raised."""

    @property
    def sha256(self) -> str:
        """The SHA-256 of the file. A remote file is downloaded first."""
        return self.file.sha256() if self.file.version() else self.identity


@dataclass
class BuildSpec:
    """All inputs of a corpus build."""

    jobs: list[Job]
    data: Data
    packing: Packing
    context_limit: int | None
    """The model's maximum context length in tokens, if it is known."""
    shares: dict[int, float]
    made_by: str
    inputs_sha256: str
    config: dict[str, Any]
    tokenizer: TokenizerRecord
    templates: list[TemplateRecord]
    warnings: list[str]
    save_tokenizer: Callable[[Path], None]
    remarks: tuple[str, ...] = ()
    """Sentences about the files of the sources, for the manifest."""
    progress: ProgressListener = silent
    find_task: Callable[[Sequence[str], int], Chosen[str]] = lambda formats, num_documents: Chosen("text", because="")
    """Finds the task of the rows, from their formats and the number of documents."""

    def source_label(self, index: int) -> str:
        """Return the name of a source for the mix report."""
        names = [f"`{source['path']}`" for source in self.config["data"]["sources"]]
        if index != NO_SHARE:
            return names[index]
        others = [name for number, name in enumerate(names) if number not in self.shares]
        return f"the other sources ({listed(others, _NUM_NAMED, noun='source')})"


def require_model_and_data(loaded: LoadedConfig) -> None:
    """Raise UserError if the config sets no model or no data."""
    if loaded.config.model is None:
        others = other_configs(loaded.base) if loaded.file is None else []
        fix = "add `model:` to the config or `--model` to the command: a folder, a `.gguf` file or a hub id"
        raise UserError(
            "no model is set, so there is no tokenizer",
            fix=f"use the config `{others[0].name}`: `--config {others[0].name}`" if others else fix,
        )
    if not loaded.config.data.sources:
        raise UserError("no data is set", fix="add `data.sources` to the config, or `--data FILE` to the command")
    require_no_open_points(loaded)


def with_labels(loaded: LoadedConfig, progress: ProgressListener = silent) -> LoadedConfig:
    """Return a config whose sources of texts with labels have the format `classification`, as `init` writes it."""
    config, sources = loaded.config, list(loaded.config.data.sources)

    def rows(index: int) -> Iterator[Any]:
        files = find_files(sources[index].path, base=loaded.base, options=source_options(config, index, progress))
        return parsed_rows(files, read_options(config.data, index))

    for index, source in enumerate(sources):
        with suppress(UserError):  # raised again when the rows are read
            if not _find_tokenized(source.path, loaded.base):
                sources[index] = with_found_labels(source, partial(rows, index))
    changes = {} if tuple(sources) == config.data.sources else {"data.sources": tuple(sources)}
    return replace(loaded, config=with_changes(config, changes))


def make_spec(
    loaded: LoadedConfig, text: TextPipeline, *, context_limit: int | None, progress: ProgressListener = silent
) -> BuildSpec:
    """Find the files of a config, hash the local ones, and collect all settings, without parsing rows."""
    config, base = loaded.config, loaded.base
    jobs = _make_jobs(loaded, text, progress)
    settings = config.model_dump(mode="json", include={"data", "template", "packing", "seed"})
    paths = [(settings["data"], "held_out"), (settings["template"], "name")]
    paths += [(source, key) for source in settings["data"]["sources"] for key in ("path", "map", "template")]
    for section, key in paths:  # independent of the machine, so that equal rows give byte-identical output
        section[key] = _portable_path(section[key], base)
    name = str(config.tokenizer or config.model)
    if Path(text.model).is_absolute() or Path(name).is_absolute():  # the folders of this machine are not named
        name = Path(text.model).name
    shares = {index: source.share for index, source in enumerate(config.data.sources) if source.share is not None}
    if shares and len(shares) < len(config.data.sources):
        shares[NO_SHARE] = 1 - sum(shares.values())
    tokenizer = TokenizerRecord.model_validate(text.tokenizer, from_attributes=True)
    inputs = [str(PIPELINE_VERSION), stable_json(settings), str(context_limit), text.tokenizer.sha256]
    inputs += [f"{job.file.name} {job.identity} {job.pipeline.cache_key()} {job.source_index}" for job in jobs]
    return BuildSpec(
        jobs=jobs,
        data=config.data,
        packing=config.packing,
        context_limit=context_limit,
        shares=shares,
        made_by=made_by(),
        inputs_sha256=sha256_text(*inputs),
        config=settings,
        tokenizer=tokenizer.model_copy(update={"source": name}),
        templates=[record.model_copy(update={"name": _portable_path(record.name, base)}) for record in text.records()],
        warnings=text.warnings,
        save_tokenizer=text.save,
        progress=progress,
        remarks=tuple(remark for source in config.data.sources for remark in _file_remarks(source.path, base)),
    )


def _file_remarks(path: str, base: Path) -> Iterator[str]:
    """Yield remarks about the files of a folder that are not read, and about links to files outside of it."""
    if is_url(path):
        return
    if shards := _find_tokenized(path, base):
        files, read = (Counter(file.name for file in some) for some in (find_files(path, base=base), shards))
        # A prepared corpus has names of its own.
        if not read - files and (others := [f"`{name}`" for name in (files - read).elements()]):
            yield f"{count(len(others), 'shard')} of a validation split not read: {listed(others)}"
        return
    if links := [f"`{name}`" for name in outside_links(path, base=base)]:
        yield (
            f"{count(len(links), 'link')} in `{path}` skipped, because the targets are outside of it: {listed(links)}; "
            "to read a target, list it in `data.sources`"
        )
    if names := unread_files(path, base=base):
        shown = listed([f"`{name}`" for name in names])
        fixes = [f"{count(len(names), 'file')} in `{path}` not read: {shown}"]
        if any(detect_format(name)[0] for name in names):
            fixes.append("to read a file, list it in `data.sources`")
        kinds = {suffix: name for name in reversed(names) if (suffix := PurePath(name).suffix.lower()) in UNREADABLE}
        fixes += [f"`{name}`: {UNREADABLE[suffix]}" for suffix, name in sorted(kinds.items())[:_NUM_ADVISED]]
        yield "; ".join(fixes)


def source_options(config: Config, index: int, progress: ProgressListener = silent) -> SourceOptions:
    """Return the options for finding the files of a source. The held-out file has those of the first source."""
    source = config.data.sources[max(index, 0)]
    has_limit = index != HELD_OUT_FILE and source.limit is not None
    return SourceOptions(config.storage, source.config, source.split, progress, has_limit)


def _make_jobs(loaded: LoadedConfig, text: TextPipeline, progress: ProgressListener) -> list[Job]:
    config, base = loaded.config, loaded.base
    paths = {index: source.path for index, source in enumerate(config.data.sources)}
    if config.data.held_out_file is not None:
        paths = {HELD_OUT_FILE: config.data.held_out_file, **paths}
    found = {
        index: _find_tokenized(path, base)
        or find_files(path, base=base, options=source_options(config, index, progress))
        for index, path in paths.items()
    }
    seen: Counter[str] = Counter()
    jobs: list[Job] = []
    for index, files in found.items():
        pipeline = _make_pipeline(loaded, text, index, found[max(index, 0)])
        for file in files:
            seen[file.name] += 1
            name = file.name if seen[file.name] == 1 else f"{file.name} ({seen[file.name]})"  # distinct in the ledger
            job = Job(replace(file, name=name), replace(pipeline, source=name), file.version() or file.sha256(), index)
            job.is_held_out, job.stamp = index == HELD_OUT_FILE, file.source.stamp()
            jobs.append(job)
    return jobs


def _find_tokenized(path: str, base: Path) -> list[SourceFile] | None:
    """Return the parts of a prepared corpus, or the shards of an earlier pipeline; None for rows."""
    from tunewell.data.corpus.old_shards import find_old_shards  # not needed for rows
    from tunewell.data.corpus.prepared import find_prepared

    return find_prepared(path, base) or find_old_shards(path, base)


def read_options(data: Data, index: int) -> ReadOptions:
    """Return how the files of one source are read. The held-out file is read like the first, but without a limit."""
    clean, source = data.clean, data.sources[max(index, 0)]
    read = ReadOptions.of(source, clean.max_row_bytes, clean.max_nesting)
    if index == HELD_OUT_FILE:
        read = replace(read, limit=None)
    # A function gets the rows as they are, unless the format is set.
    return replace(read, format="messages") if source.map is not None and source.format == "auto" else read


def _make_pipeline(loaded: LoadedConfig, text: TextPipeline, index: int, files: list[SourceFile]) -> RowPipeline:
    """Return the pipeline of one source. The held-out file has that of the first source, without its limit."""
    data = loaded.config.data
    source, clean, read = data.sources[max(index, 0)], data.clean, read_options(data, index)
    masker = text.masker(source)
    if any(file.format == TOKENIZED for file in files):
        from tunewell.data.corpus.prepared import require_same_text  # not needed for rows

        require_same_text(files, source, text.tokenizer, masker)
    marks_input = masker is not None and "has_input" in masker.template.source
    options = FormatOptions(labels=labels_of(source, partial(parsed_rows, files, read)), marks_input=marks_input)
    settings = {
        "source": source.model_dump(
            mode="json", exclude={"path", "config", "split", "share", "limit", "map", "template"}
        ),
        "clean": clean.model_dump(
            mode="json",
            include={"bad_text", "min_reply_chars", "drop_urls", "max_nesting", "bad_rows", "thinking", "secrets"},
        ),
        "learn": [masker.rule.learn_from, *masker.rule.roles] if masker else [],
        "options": asdict(options),
    }
    return RowPipeline(
        source=source.path,
        read=read,
        converter=Converter.of(source, options),
        clean=clean,
        masker=masker,
        encoder=text.encoder(masker),
        row_function=load_row_function(source.map, batch=source.map_batch, base=loaded.base) if source.map else None,
        settings=settings,
    )


def _portable_path(value: Any, base: Path) -> Any:
    if not isinstance(value, str) or not Path(value).expanduser().is_absolute():
        return value
    path, home = Path(value).expanduser(), base.resolve()
    return path.relative_to(home).as_posix() if path.is_relative_to(home) else path.name
