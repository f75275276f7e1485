"""Resolve a path or name to a model: a run's best checkpoint, an adapter, a model folder or a hub id."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tunewell.config.extensions import METHODS
from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.core.cache import sha256_once
from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_text
from tunewell.core.redact import REDACTED
from tunewell.inference.model_ref import ModelRef
from tunewell.model_files.facts import read_facts
from tunewell.model_files.files import locate
from tunewell.model_files.presets import is_preset
from tunewell.models.base_content import cannot_compare
from tunewell.records.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config
from tunewell.records.base_model import BASE, BaseContent, read_base
from tunewell.records.checkpoint import checkpoint_name, checkpoint_step, saved_steps, verify
from tunewell.records.manifest import MANIFEST, read_manifest
from tunewell.records.parity import PROOF, Proof, read_proof
from tunewell.records.plan import PLAN, Plan, read_plan
from tunewell.records.rundir import RUN_CONFIG, find_outcome
from tunewell.training.find_checkpoints import OPTIMIZER, Saved, find_best, find_newest

_CHECKPOINTS = "checkpoints"


def _is_unread(step: int, file: str) -> bool:
    """Return whether a file is the optimizer state, twice as large as the model and of no use without training."""
    return file == OPTIMIZER


def resolve_model(
    path_or_name: str | PathLike[str] | ModelRef | None,
    *,
    checkpoint: str = "best",
    base: str | None = None,
    template: str | None = None,
    sets: Sequence[str] = (),
) -> ModelRef:
    """Resolve a path or name to a run, an adapter or a model. None is the run of the config in the current folder.

    `checkpoint` is `best`, `last` or a step. `base` is the base model of an adapter or a fine-tuned model, if its files
    do not name it. Raises UserError if the model is not found.
    """
    if isinstance(path_or_name, ModelRef):
        return path_or_name  # resolved before torch was imported; its files are not hashed twice
    name = str(current_run()) if path_or_name is None else fspath(path_or_name)
    path = Path(name).expanduser()
    if checkpoint_step(path.name) is not None and (path.parent.parent / PLAN).is_file():
        path, checkpoint = path.parent.parent, str(checkpoint_step(path.name))
    if (path / PLAN).is_file():
        if template is not None:
            raise UserError("a run uses the template it was trained with", fix="leave out `--template`")
        return _resolve_run(path, checkpoint, base, sets)
    if (path / ADAPTER_CONFIG).is_file():
        return _resolve_adapter(path, base, template, sets)
    if (path / _CHECKPOINTS).is_dir():
        raise UserError(f"`{path}` has checkpoints but no `{PLAN}`", fix="name one of its checkpoint folders")
    if not is_preset(name):
        locate(name)  # raises UserError if there is no such model
    if is_path := path.exists():
        _proof_of(path)
    model = str(path) if is_path else name
    loaded = _model_config(model, template, sets, tokenizer=None)
    name = path.resolve().name if is_path else model  # `.` has no name
    return ModelRef(name, "model", path if is_path else None, model, None, base, loaded)


def find_current_run() -> Path | None:
    """Return the run that the config in this folder names, or None if there is none yet."""
    loaded = load_config()
    run = loaded.path(loaded.config.run)
    return run if (run / PLAN).is_file() else None


def current_run() -> Path:
    """Return the run that the config in this folder names; raise UserError if there is none yet."""
    if (run := find_current_run()) is None:
        loaded = load_config()
        where = f"`{FILE_NAME}` names the run `{loaded.config.run}`" if loaded.file else f"there is no `{FILE_NAME}`"
        raise UserError(
            "there is no run in this folder", where=where, fix="name a run or a model, or run `tunewell train`"
        )
    return run


def _resolve_run(run: Path, checkpoint: str, base: str | None, sets: Sequence[str]) -> ModelRef:
    plan = read_plan(run)
    loaded = load_config(run / RUN_CONFIG, sets)
    notes: list[str] = []
    saved, because = _choose_checkpoint(run / _CHECKPOINTS, checkpoint, plan, notes.append)
    is_adapter = METHODS.entry(plan.method.value).is_adapter
    base_model: str | None = base or loaded.seen(loaded.config.model or plan.model)
    if REDACTED in str(base_model):
        what = "the name of the base model contains a secret, so it was not saved with the run"
        fix = "set it with `--base MODEL`"
        if is_adapter:
            raise UserError(what, where=str(run), fix=fix)
        notes.append(f"{what}; to compare with the base model, {fix}")
        base_model = None
    loaded, added = _with_corpus_tokenizer(loaded, plan, notes)
    if (trained_on := read_base(run)) is None:
        trained_on = BaseContent(fingerprint=saved.manifest.identity.get("weights"))
        if is_adapter and not is_preset(plan.model):
            notes.append(f"the run has no `{BASE}`: tokenizer and config of its base model are not checked for changes")
    ref = ModelRef(
        name=f"{run.resolve().name}, step {saved.step}",
        kind="run",
        path=run,
        model=base_model if is_adapter and base_model else str(saved.path),
        adapter=saved.path if is_adapter else None,
        base=base_model,
        loaded=loaded,
        added_tokens=added,
        plan=plan,
        start=loaded.path(loaded.config.method.adapter) if is_adapter and loaded.config.method.adapter else None,
        step=saved.step,
        because=because,
        notes=notes,
        trained_on=trained_on,
    )
    ref.require_base()
    if base_model and cannot_compare(base_model, trained_on):
        notes.append(f"the weights of `{base_model}` are in another format than in training and cannot be compared")
    if not is_adapter and (changes := ref.base_changes()):
        notes.append(f"no comparison with the base model, which has changed since training: {'; '.join(changes)}")
        return replace(ref, base=None)
    return ref


def _choose_checkpoint(folder: Path, wanted: str, plan: Plan, on_trouble: Callable[[str], None]) -> tuple[Saved, str]:
    if wanted not in ("best", "last"):
        return _checkpoint_at(folder, wanted)
    if wanted == "best" and (best := find_best(folder, on_trouble=on_trouble, unread=_is_unread)) is not None:
        return best, best.why_best
    newest = find_newest(folder, on_trouble=on_trouble, unread=_is_unread)
    if newest is None:
        run, outcome = shlex.quote(str(folder.parent)), find_outcome(folder.parent)
        is_stopped = outcome is not None and outcome.status == "stopped"  # it would stop again
        fix = f"`tunewell diagnose {run}`" if is_stopped else f"resume it with `tunewell train --resume --out {run}`"
        raise UserError("the run has no checkpoint yet", where=str(folder), fix=fix)
    if wanted == "last":
        return newest, "the newest"
    match newest.manifest.progress.get("best_step"):
        case None:
            because = "no rows were set aside to compare checkpoints (`data.selection`)"
            if plan.answers is not None and not plan.answers.value:
                because = plan.answers.because.removesuffix(": the last checkpoint is used")
        case 0:  # the base model, which is evaluated but not saved
            because = "none is better than the base model on the selection slice"
        case _:
            because = "the best was deleted"
    return newest, f"the newest; {because}"


def _checkpoint_at(folder: Path, wanted: str) -> tuple[Saved, str]:
    steps = saved_steps(folder)
    if not wanted.isdecimal() or int(wanted) not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise UserError(
            f"there is no checkpoint `{wanted}`",
            where=f"{folder}: steps {there}",
            fix="name one of these steps, `best` or `last`",
        )
    path = folder / checkpoint_name(int(wanted))
    return Saved(path, verify(path, unread=lambda file: file == OPTIMIZER)), "named by the user"


def _with_corpus_tokenizer(loaded: LoadedConfig, plan: Plan, notes: list[str]) -> tuple[LoadedConfig, tuple[str, ...]]:
    """Return the config with the tokenizer of the corpus, and the added tokens, if the corpus still fits the run."""
    folder = loaded.path(loaded.config.corpus)
    if not (folder / MANIFEST).is_file():
        notes.append(f"the corpus `{loaded.config.corpus}` is missing; the model's own tokenizer and template are used")
        return loaded, ()
    tokenizer = read_manifest(folder).tokenizer
    if tokenizer.sha256 != plan.tokenizer_sha256:
        notes.append("the corpus was prepared again with another tokenizer; the model's own tokenizer is used")
        return loaded, ()
    config = loaded.config.model_copy(update={"tokenizer": str(folder / "tokenizer")})
    return replace(loaded, config=config), tuple(tokenizer.added_by_us)


def _resolve_adapter(folder: Path, base: str | None, template: str | None, sets: Sequence[str]) -> ModelRef:
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(
            f"the adapter in `{folder}` has no `{ADAPTER_WEIGHTS}`",
            fix="an old adapter in pickle format: load it with PEFT and save it again",
        )
    proof = _proof_of(folder)
    saved_base = read_adapter_config(folder).get("base_model_name_or_path")
    if proof is not None and (proof.base or "").startswith("package:"):
        saved_base = proof.base  # the config names the original, for other programs
    base_model = base or saved_base
    if not isinstance(base_model, str) or not base_model:
        raise UserError(f"the adapter in `{folder}` does not name its base model", fix="add `--base MODEL`")
    if base is None and not Path(base_model).exists() and (folder / base_model).exists():
        base_model = str(folder / base_model)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    loaded = _model_config(base_model, template, sets, tokenizer=str(folder) if has_tokenizer else None)
    added = _added_tokens(folder, base_model) if has_tokenizer else ()
    ref = ModelRef(folder.resolve().name, "adapter", folder, base_model, folder, base_model, loaded, added_tokens=added)
    if proof is not None:
        ref = replace(ref, trained_on=proof.trained_on)
        ref.require_base()
    return ref


def _proof_of(artefact: Path) -> Proof | None:
    """Return the proof of an exported file or folder. Raise UserError if its weights have changed since the export."""
    path = artefact.absolute()
    folder = next((folder for folder in path.parents[:2] if (folder / PROOF).is_file()), None)
    if folder is None:
        return None
    proof = read_proof(folder)
    hashes = {folder / name: sha256 for own in proof.artefacts for name, sha256 in own.sha256s.items()}
    for file in (path, *path.glob("*.safetensors")):
        if file in hashes and sha256_once(file) != hashes[file]:
            raise UserError(
                f"`{file.relative_to(folder)}` has changed since it was exported",
                where=f"`{folder / PROOF}` has another hash of it",
                fix="export the model again, or restore the file",
            )
    return proof


def _added_tokens(folder: Path, base: str) -> tuple[str, ...]:
    """Return the tokens that an adapter adds to its base model, that is, tokens with new embedding rows."""
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, "np") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys() if ".lora_" not in name]  # noqa: SIM118
        added = parse_json(read_text(folder / "tokenizer.json")).get("added_tokens") or []
    except (SafetensorError, ValueError):
        return ()  # loading the adapter reports the damage
    num_rows = max((shape[0] for shape in shapes if len(shape) == 2), default=0)
    known = read_facts(base).vocab_size if num_rows else None
    return tuple(token["content"] for token in added if known is not None and known <= token["id"] < num_rows)


def _model_config(model: str, template: str | None, sets: Sequence[str], *, tokenizer: str | None) -> LoadedConfig:
    """Return a config for a model without a run. A config file in the current folder is ignored."""
    named = {"tokenizer": tokenizer, "template.name": template}
    flags = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return load_config(None, [*flags, *sets], model=model, has_file=False)
