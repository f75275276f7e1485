"""`tunewell init`: write a commented `tunewell.yaml` for your rows and a model."""

import re
import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from tunewell.config.edit import set_key
from tunewell.config.extensions import METHODS
from tunewell.config.keys import dotted_name, parse_key, resolve_alias
from tunewell.config.load import FILE_NAME, LoadedConfig, load_config, with_changes
from tunewell.config.schema import Config
from tunewell.config.yaml_reader import read_value
from tunewell.core.errors import UserError
from tunewell.core.files import is_url, write_atomic
from tunewell.core.progress import ProgressListener, silent
from tunewell.core.questions import Asker, MenuQuestion
from tunewell.data.corpus.assembly import SAMPLE_ROWS
from tunewell.data.corpus.spec import source_options
from tunewell.data.sources.base import find_files, split_limit
from tunewell.data.sources.blocks import count_rows
from tunewell.data.sources.recognise import Recognised, held_out_beside, read_options, recognise
from tunewell.data.templates.chat_template import builtin_template, required_markers
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer
from tunewell.model_files.facts import read_facts
from tunewell.model_files.families import read_packing
from tunewell.planning.first_config import InitResult, Recipe, config_text, find_recipe
from tunewell.planning.recommendation import RECOMMENDED, is_open, recommend_settings, task_of_rows
from tunewell.records.manifest import Manifest, RowsRecord
from tunewell.records.plan import Chosen
from tunewell.runs.config import with_start
from tunewell.workflows.prepare import temporary_corpus

_BY_FIT = ("chatml", "llama3", "gemma", "alpaca")
"""Built-in templates, in the order in which they are tried for a model without a chat template."""
_OF_SOURCE = "data.sources"


def init(
    data: str,
    *,
    model: str,
    method: str = "lora",
    out: Path | None = None,
    sets: Sequence[str] = (),
    is_overwriting: bool = False,
    is_draft: bool = False,
    ask: Asker | None = None,
    progress: ProgressListener = silent,
) -> InitResult:
    """Write `tunewell.yaml` for this data and model. Raise UserError if the file exists or no row can be used.

    `method` is a name in `planning.first_config.RECIPES` or `METHODS`. `sets` are `KEY=VALUE` of the config; keys of
    the rows are `data.sources[0].columns` and so on. `ask` is called for what cannot be told from the files. Without
    it, such points stay open in the config. With `is_draft`, nothing is written.
    """
    recipe, path = find_recipe(method), out or Path(FILE_NAME)
    if path.exists() and not (is_overwriting or is_draft):
        raise UserError(f"`{path}` already exists", fix="use `--force` to replace it, or `--out` for another name")
    plain, limit = split_limit(data)
    wanted = load_config({"data": {"sources": [{"path": plain}]}}, sets, model=model)
    files = find_files(plain, base=Path(), options=source_options(wanted.config, 0, progress))
    given = with_start(replace(wanted, config=wanted.config.model_copy(update={"data": Config().data})))[0].config
    base = given.model or model
    template = given.template.name
    if template == "auto":
        template = _fitting_template(load_tokenizer(given.tokenizer or base))
    first = wanted.config.data.sources[0]
    source_sets, limit = first.model_dump(exclude_unset=True, exclude={"path", "limit"}), limit or first.limit
    with _naming_the_option():
        source = recognise(files, source_sets, limit=limit, ask=ask)
        sample = _sample(wanted, (plain, limit), template, source, progress)
    facts, packing, held_out = read_facts(base), read_packing(base), held_out_beside(files)
    num_rows = count_rows(files, read_options(source, limit))
    own = {**source.settings, "path": plain, "limit": limit}
    tree = {**wanted.config.model_dump(exclude_unset=True), "data": {"sources": [own]}}
    formats = [name for one in sample.sources for name in one.formats]
    task = task_of_rows(Config.model_validate(tree), formats, sample.documents, base=Path())
    assert sample.rows is not None
    rows = sample.rows.model_copy(update={"num_rows": num_rows, "task": task.value, "because": task.because})
    settings = _settings(rows, facts.num_parameters, given, recipe)
    tested = count_rows(find_files(held_out, base=Path()), read_options(source)) if held_out else 0
    result = InitResult(
        path,
        text="",
        sample=sample,
        facts=facts,
        packing=packing,
        num_rows=num_rows,
        held_out=held_out,
        template=template,
        rows=rows,
        settings=settings,
        source=source,
        long_documents=_long_documents(sample, facts.context_limit, ask),
        task=task,
        method=method,
        num_rows_in_file=tested,
    )
    text = config_text(result, f"{plain}#{limit}" if limit else data, model)
    for key, value in _other_sets(sets):
        text = set_key(text, key, value, comment="as you said")
    if not is_draft:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return replace(result, text=text)


def _settings(rows: RowsRecord, num_parameters: int | None, given: Config, recipe: Recipe) -> dict[str, Chosen[Any]]:
    """Return the recommended settings, and those that are given in place of them."""
    method = {} if "kind" in given.method.model_fields_set else {"method.kind": recipe.kind}
    optimizer = {} if "optimizer" in given.train.model_fields_set else {"train.optimizer": recipe.optimizer}
    config = with_changes(given, method | optimizer)
    found = recommend_settings(rows, num_parameters, config)
    is_adapter = METHODS.entry(config.method.kind).is_adapter
    because = "as you said" if given.method.adapter is None else "that of the adapter, which goes on being trained"
    return {
        key: found.get(key) or Chosen(attrgetter(key)(config), because=because)
        for key in RECOMMENDED
        if (key in found or not is_open(config, key)) and (is_adapter or not key.startswith("method"))
    }


def init_to_train(
    data: str,
    *,
    model: str | Callable[[], str],
    sets: Sequence[str] = (),
    ask: Asker | None = None,
    progress: ProgressListener = silent,
) -> InitResult | None:
    """Write `tunewell.yaml` for `tunewell train DATA`. Return None if the one that is there has this data and model.

    `model` is its name, or a function that chooses one if it is needed.
    """
    named = None if callable(model) else model
    command = shlex.join(["tunewell", "init", data, *(["--model", named] if named else []), *as_options(sets)])
    if Path(FILE_NAME).exists():
        known = load_config().config
        if _is_for(known, data) and named in (None, known.model):
            return None
        paths = ", ".join(f"`{own.path}`" for own in known.data.sources) or "no rows"
        raise UserError(
            f"`{FILE_NAME}` is here already, for other rows or another model",
            where=f"it names {paths} and the model `{known.model}`",
            fix=f"`tunewell train` uses it as it is; `{command} --force` replaces it",
        )
    result = init(data, model=model() if callable(model) else model, sets=sets, ask=ask, progress=progress)
    if result.source.open_points:
        questions = "; ".join(f"`{key}`: {question}" for key, question in result.source.open_points.items())
        flags = " ".join(result.source.flags.values())
        raise UserError(questions, fix=f"decide, for example: `{command} --force {flags}`; then `tunewell train`")
    return result


def as_options(sets: Sequence[str]) -> list[str]:
    """Return `KEY=VALUE` settings as arguments of a command line."""
    return [part for text in sets for part in ("--set", text)]


def _is_for(config: Config, data: str) -> bool:
    """Return True if a config in this folder reads these rows and no others, however their path is written."""
    path, limit = split_limit(data)
    known = [own.path if is_url(own.path) else Path(own.path).expanduser().resolve() for own in config.data.sources]
    is_same = known == [path if is_url(path) else Path(path).expanduser().resolve()]
    return is_same and limit in (None, config.data.sources[0].limit)


def _other_sets(sets: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the keys and values of `--set` that are not keys of the source, which the source has already."""
    parts = [(text, *text.partition("=")[::2]) for text in sets]
    values = [(dotted_name(resolve_alias(parse_key(key.strip()))), read_value(own, text)) for text, key, own in parts]
    return [(key, value) for key, value in values if not key.startswith(_OF_SOURCE)]


@contextmanager
def _naming_the_option() -> Generator[None, None, None]:
    """Add the option of `init` to errors whose fix is a key of the source."""
    try:
        yield
    except UserError as error:
        if not (found := re.search(r"`(\w+): ([^`]+)` on the source", error.fix or "")):
            raise
        option = f"add `--set 'data.sources[0].{found[1]}={found[2]}'` to `tunewell init`"
        raise UserError(error.what, where=error.where, fix=f"{error.fix}; {option}") from error


def _fitting_template(tokenizer: LoadedTokenizer) -> str:
    """Return `auto` for a model with a chat template, otherwise a built-in template that fits the tokenizer."""
    if tokenizer.chat_template:
        return "auto"
    for name in _BY_FIT:
        needed = required_markers(builtin_template(name), tokenizer.special_tokens)
        if all(marker in tokenizer.added for marker in needed) and "eos_token" in tokenizer.special_tokens:
            return name
    return "auto"


def _sample(
    wanted: LoadedConfig,
    data: tuple[str, int | None],
    template: str,
    source: Recognised,
    progress: ProgressListener,
) -> Manifest:
    """Prepare the first rows in a temporary folder, and return the manifest."""
    plain, limit = data
    own = {**source.settings, "path": plain, "limit": min(limit or SAMPLE_ROWS, SAMPLE_ROWS)}
    tree = wanted.config.model_dump(exclude_unset=True)
    values = {
        "data": {**tree["data"], "sources": [own], "held_out": 0.0, "selection": 0, "index": None},
        "template": {**tree.get("template", {}), "name": template},
        "packing": {**tree.get("packing", {}), "long_documents": "split"},
    }
    with temporary_corpus(wanted, values, progress) as corpus:
        return corpus.manifest


def _long_documents(sample: Manifest, limit: int | None, ask: Asker | None) -> str:
    """Return what happens to rows that are longer than the model can read: texts are split, chats are asked for."""
    if not sample.pieces:
        return "error"
    if {name for source in sample.sources for name in source.formats} == {"text"}:
        return "split"
    options = (("split", "cut them into pieces"), ("drop", "leave them out"))
    text = f"Some rows are longer than the {limit or sample.packing.context_length:,} tokens that the model can read."
    return (ask(MenuQuestion(text, options)) if ask else None) or "error"
