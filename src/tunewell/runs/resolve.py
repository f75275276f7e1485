"""Find what is to be asked, judged or served: a run's best checkpoint, an adapter, or a model as it is."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.config.methods import METHODS
from tunewell.core.errors import UserError
from tunewell.core.model_files import locate
from tunewell.core.presets import is_preset
from tunewell.core.redact import REDACTED
from tunewell.inference.model_ref import ModelRef
from tunewell.methods.peft_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunewell.models.facts import read_facts
from tunewell.records.checkpoint import CheckpointManifest, checkpoint_name, checkpoint_step, verify
from tunewell.records.manifest import MANIFEST, read_manifest
from tunewell.records.plan import PLAN, Plan, read_plan
from tunewell.records.rundir import RUN_CONFIG
from tunewell.training.saved_checkpoints import Saved, find_best, find_newest, saved_steps

_CHECKPOINTS = "checkpoints"


def resolve_model(
    place: str | Path | None,
    *,
    checkpoint: str = "best",
    base: str | None = None,
    template: str | None = None,
    sets: Sequence[str] = (),
) -> ModelRef:
    """Find a run, an adapter or a model; None means the run of the config in the current folder.

    `checkpoint` is `best`, `last` or a step. `base` names the model an adapter or a tuned model was made from, where
    that is not written beside it. Raises UserError when there is nothing to load.
    """
    if place is None:
        place = _run_of_config()
    path = Path(place).expanduser()
    if checkpoint_step(path.name) is not None and (path.parent.parent / PLAN).is_file():
        path, checkpoint = path.parent.parent, str(checkpoint_step(path.name))
    if template is not None and (path / PLAN).is_file():
        raise UserError("a run has its own template", fix="leave out `--template`")
    if (path / PLAN).is_file():
        return _of_run(path, checkpoint, base, sets)
    if (path / ADAPTER_CONFIG).is_file():
        return _of_adapter(path, base, template, sets)
    if (path / _CHECKPOINTS).is_dir():
        raise UserError(f"`{path}` holds checkpoints but no `{PLAN}`", fix="name one of its checkpoint folders")
    if not is_preset(str(place)):
        locate(str(place))  # says at once what is not there
    name = path.name if path.exists() else str(place)
    found = str(path) if path.exists() else str(place)
    loaded = _config_of(found, template, sets, tokenizer=None)
    return ModelRef(name, "model", path if path.exists() else None, found, None, base, loaded)


def _run_of_config() -> Path:
    loaded = load_config()
    run = loaded.path(loaded.config.run)
    if not (run / PLAN).is_file():
        where = f"`{FILE_NAME}` names the run `{loaded.config.run}`" if loaded.file else f"no `{FILE_NAME}` is here"
        raise UserError("there is no run here", where=where, fix="name a run or a model, or run `tunewell train`")
    return run


def _of_run(run: Path, checkpoint: str, base: str | None, sets: Sequence[str]) -> ModelRef:
    plan = read_plan(run)
    loaded = load_config(run / RUN_CONFIG, sets)
    notes: list[str] = []
    saved, because = _choose(run / _CHECKPOINTS, checkpoint, notes.append)
    is_adapter = METHODS.entry(plan.method.value).is_adapter
    made_from: str | None = base or loaded.seen(loaded.config.model or plan.model)
    if REDACTED in str(made_from):
        made_from = _without_name(run, notes, is_adapter=is_adapter)
    own, added = _with_corpus_tokenizer(loaded, plan, notes)
    return ModelRef(
        name=f"{run.resolve().name}, step {saved.step}",
        kind="run",
        path=run,
        model=made_from if is_adapter and made_from else str(saved.path),
        adapter=saved.path if is_adapter else None,
        base=made_from,
        loaded=own,
        added_tokens=added,
        plan=plan,
        step=saved.step,
        because=because,
        notes=notes,
    )


def _choose(folder: Path, wanted: str, on_trouble: Callable[[str], None]) -> tuple[Saved, str]:
    if wanted not in ("best", "last"):
        return _numbered(folder, wanted)
    best = find_best(folder, on_trouble=on_trouble) if wanted == "best" else None
    if best is not None:
        return best, "the best by held-out loss"
    newest = find_newest(folder, on_trouble=on_trouble)
    if newest is None:
        raise UserError(
            "the run has no checkpoint yet", where=str(folder), fix="let it train on: `tunewell train --resume`"
        )
    return newest, "the newest" if wanted == "last" else _why_not_best(newest.manifest.progress.get("best_step"))


def _why_not_best(best: int | None) -> str:
    if best is None:
        return "the newest; no step has a held-out loss"
    # Before the first step the base model is looked at, which is not saved.
    return "the newest; by held-out loss none is better than the base" if best == 0 else "the newest; the best is gone"


def _numbered(folder: Path, wanted: str) -> tuple[Saved, str]:
    steps = saved_steps(folder)
    if not wanted.isdecimal() or int(wanted) not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise UserError(f"there is no checkpoint `{wanted}`", where=f"{folder}: steps {there}", fix="or `best`, `last`")
    path = folder / checkpoint_name(int(wanted))
    manifest: CheckpointManifest = verify(path)
    return Saved(path, manifest), "as asked"


def _with_corpus_tokenizer(loaded: LoadedConfig, plan: Plan, notes: list[str]) -> tuple[LoadedConfig, tuple[str, ...]]:
    """Take the tokenizer that the corpus was made with, where it is still the run's."""
    folder = loaded.path(loaded.config.corpus)
    if not (folder / MANIFEST).is_file():
        notes.append(f"the corpus `{loaded.config.corpus}` is gone; tokenizer and template are the model's own")
        return loaded, ()
    tokenizer = read_manifest(folder).tokenizer
    if tokenizer.sha256 != plan.tokenizer_sha256:
        notes.append("the corpus was made anew with another tokenizer since; the model's own is used")
        return loaded, ()
    config = loaded.config.model_copy(update={"tokenizer": str(folder / "tokenizer")})
    return replace(loaded, config=config), tuple(tokenizer.added_by_us)


def _without_name(run: Path, notes: list[str], *, is_adapter: bool) -> None:
    """Do without the base of a whole model; raise UserError for an adapter, which is nothing without it."""
    what = "the name of the model that the run began with holds a secret and was not written down"
    fix = "name it with `--base MODEL`"
    if is_adapter:
        raise UserError(what, where=str(run), fix=fix)
    notes.append(f"{what}; to compare with it, {fix}")


def _of_adapter(folder: Path, base: str | None, template: str | None, sets: Sequence[str]) -> ModelRef:
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(
            f"the adapter in `{folder}` has no `{ADAPTER_WEIGHTS}`",
            fix="older ones are pickles: load it with PEFT and save it again",
        )
    try:
        written: Any = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise UserError(f"`{folder / ADAPTER_CONFIG}` is damaged", where=str(error)) from error
    made_from = base or written
    if not made_from:
        raise UserError(f"the adapter in `{folder}` does not say what it was made from", fix="add `--base MODEL`")
    if base is None and not Path(made_from).exists() and (folder / made_from).exists():
        made_from = str(folder / made_from)
    has_own = (folder / "tokenizer.json").is_file()
    loaded = _config_of(made_from, template, sets, tokenizer=str(folder) if has_own else None)
    added = _own_tokens(folder, made_from) if has_own else ()
    return ModelRef(folder.name, "adapter", folder, made_from, folder, made_from, loaded, added_tokens=added)


def _own_tokens(folder: Path, base: str) -> tuple[str, ...]:
    """Name the tokens of an adapter's tokenizer that its base does not know, where the adapter has rows for them."""
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, "np") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys() if ".lora_" not in name]  # noqa: SIM118
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens") or []
    except (SafetensorError, ValueError):
        return ()  # whoever loads them says what is wrong
    num_rows = max((shape[0] for shape in shapes if len(shape) == 2), default=0)
    known = read_facts(base).vocab_size if num_rows else None
    return tuple(token["content"] for token in added if known is not None and known <= token["id"] < num_rows)


def _config_of(model: str, template: str | None, sets: Sequence[str], *, tokenizer: str | None) -> LoadedConfig:
    """Make a config that names a model and little else; what lies in the current folder has no say in it."""
    named = {"tokenizer": tokenizer, "template.name": template}
    flags = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return load_config(None, [*flags, *sets], model=model, has_file=False)
