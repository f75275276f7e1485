"""The start of a run that goes on from an earlier run or an adapter: its base model, tokenizer and settings."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tunewell.config.load import LoadedConfig, relative_path
from tunewell.config.schema import MethodSettings
from tunewell.core.errors import UserError
from tunewell.core.files import sha256_file
from tunewell.inference.model_ref import ModelRef
from tunewell.methods.base import adapter_method
from tunewell.model_files.files import locate
from tunewell.model_files.presets import is_preset
from tunewell.records.adapter import ADAPTER_WEIGHTS, read_adapter_config
from tunewell.records.plan import PLAN, Start
from tunewell.records.rundir import OUTCOME, find_outcome
from tunewell.runs.resolve import resolve_model

_MODEL_WEIGHTS = "model.safetensors"
_FIXED = ("rank", "alpha", "rslora")
"""Settings with which the weights of an adapter were trained. Layers are compared when the model is loaded."""


def find_start(loaded: LoadedConfig) -> tuple[LoadedConfig, Start]:
    """Resolve `model: RUN` or `method.adapter`. Return the config with its base model and adapter, and the start.

    An adapter goes on being trained on its base model; a fully fine-tuned model is the base of the new run. Tokenizer
    and template are those of the earlier run unless the config sets a tokenizer. Raises UserError if the earlier run
    did not finish, if its base model is missing or has changed, or if the settings do not fit the adapter.
    """
    config = loaded.config
    adapter, key = config.method.adapter, "method.adapter" if config.method.adapter else "model"
    name = adapter or config.model or ""
    path = loaded.path(name)
    if (path / PLAN).is_file():
        _require_finished(path)
    elif adapter and not path.exists():
        raise UserError(f"there is no adapter `{name}`", where=loaded.origin(key))
    ref = _resolve(path, name, loaded, base=loaded.seen(config.model) if adapter and config.model else None)
    if adapter and ref.adapter is None:
        raise UserError(
            f"`{name}` is a complete model, not an adapter", where=loaded.origin(key), fix=f"write `model: {name}`"
        )
    update: dict[str, Any] = {"model": _spelled(ref.model, loaded)}
    if ref.adapter is not None:
        _require_base(ref, loaded)
        update["method"] = _quantized_as_before(_method_settings(ref.adapter, name, loaded), ref, loaded)
    if config.tokenizer is None and (tokenizer := _tokenizer(ref)):
        update["tokenizer"] = _spelled(tokenizer, loaded)
    folder, file = (ref.adapter, ADAPTER_WEIGHTS) if ref.adapter else (Path(ref.model), _MODEL_WEIGHTS)
    start = Start(path=_spelled(str(folder), loaded), step=ref.step, sha256=sha256_file(folder / file))
    return replace(loaded, config=config.model_copy(update=update)), start


def _resolve(path: Path, name: str, loaded: LoadedConfig, base: str | None) -> ModelRef:
    try:
        return resolve_model(path, base=base)
    except UserError as error:
        if "--base" not in (error.fix or ""):  # other commands have this option
            raise
        fix = f"set `model` to the base model and `method.adapter` to `{name}`"
        raise UserError(error.what, where=error.where or loaded.origin("model"), fix=fix) from error


def _require_finished(run: Path) -> None:
    outcome = find_outcome(run)
    if outcome is None or outcome.status != "finished":
        raise UserError(
            f"the run `{run}` did not finish",
            where=outcome.reason if outcome else f"it has no `{OUTCOME}`",
            fix=f"finish it with `tunewell train --resume --out {shlex.quote(str(run))}`, or name one of its "
            f"checkpoints: `{run / 'checkpoints'}/step-...`",
        )


def _require_base(ref: ModelRef, loaded: LoadedConfig) -> None:
    """Raise UserError if the base model of an adapter is missing, or a preset with another seed."""
    base, adapter = ref.model, _spelled(str(ref.adapter), loaded)
    fix = f"set `model` to the base model and `method.adapter` to `{adapter}`"
    if not is_preset(base):
        try:
            locate(base)
        except UserError as error:
            raise UserError(f"the base model `{base}` of `{ref.name}` is missing", where=error.what, fix=fix) from error
    if ref.plan is not None and is_preset(base) and loaded.config.seed != ref.plan.seed:
        raise UserError(
            f"`{base}` has other random weights with `seed: {loaded.config.seed}`",
            fix=f"set `seed: {ref.plan.seed}`, as in the earlier run",
        )


def _method_settings(adapter: Path, name: str, loaded: LoadedConfig) -> MethodSettings:
    """Return the method's settings with those of the adapter. Raise UserError for settings that contradict it."""
    given = loaded.config.method
    merge = f"merge it with `tunewell export {shlex.quote(name)} --to merged --out NEW`, then train `NEW/merged`"
    if (kind := adapter_method(adapter)) is None or (kind != given.kind and "kind" in given.model_fields_set):
        raise UserError(
            f"`{name}` is an adapter{f' of `method.kind: {kind}`' if kind else ' that tunewell does not support'}, but "
            f"the config has `method.kind: {given.kind}`",
            where=loaded.origin("method.kind"),
            fix=f"to go on training the adapter, set `method.kind: {kind}`; or {merge}" if kind else merge,
        )
    saved = _saved_settings(adapter)
    for key in _FIXED:
        if key in given.model_fields_set and getattr(given, key) != saved.get(key):
            raise UserError(
                f"the config has `method.{key}: {getattr(given, key)}`, but the adapter `{name}` was trained with "
                f"{saved.get(key, 'another value')}",
                where=loaded.origin(f"method.{key}"),
                fix=f"remove `method.{key}` to go on training the adapter; or {merge} with the new value",
            )
    unset = {key: value for key, value in saved.items() if key not in given.model_fields_set}
    return given.model_copy(update=unset | {"kind": kind, "adapter": _spelled(str(adapter), loaded)})


def _quantized_as_before(method: MethodSettings, ref: ModelRef, loaded: LoadedConfig) -> MethodSettings:
    """Return the settings with the quantisation of the earlier run, whose adapter belongs to these base weights."""
    base = ref.plan.quantized if ref.plan else None
    if ref.plan is None or (base is not None and base.is_saved):
        return method
    kind: Literal["none", "nf4", "int8"] = base.kind if base else "none"
    if "quantize" in method.model_fields_set and method.quantize != kind:
        raise UserError(
            f"`{ref.name}` was trained on a base model with `method.quantize: {kind}`",
            where=loaded.origin("method.quantize"),
            fix="remove `method.quantize` to go on with the same base model",
        )
    return method.model_copy(update={"quantize": kind, "keep": tuple(base.keep) if base else ()})


def _saved_settings(adapter: Path) -> dict[str, Any]:
    """Return the settings in an `adapter_config.json` that our config can express."""
    config = read_adapter_config(adapter)
    alpha, layers = config.get("lora_alpha"), config.get("layers_to_transform")
    settings: dict[str, Any] = {
        "rank": config.get("r"),
        "alpha": int(alpha) if alpha is not None and float(alpha).is_integer() else None,
        "rslora": bool(config.get("use_rslora")),
        "dropout": config.get("lora_dropout") or 0.0,
        "layers": tuple(layers) if isinstance(layers, list) else None,
        "modules_to_save": tuple(config.get("modules_to_save") or ()) or None,
    }
    targets = config.get("target_modules")
    if isinstance(targets, list) and not config.get("target_parameters"):
        settings["targets"] = tuple(sorted(targets))
    return {key: value for key, value in settings.items() if value is not None}


def _tokenizer(ref: ModelRef) -> str | None:
    """Return the tokenizer of the earlier run or adapter; None if an adapter uses the one of its base model."""
    tokenizer = ref.loaded.config.tokenizer
    if ref.plan is not None and (ref.corpus is None or tokenizer != str(ref.corpus / "tokenizer")):
        raise UserError(
            f"the tokenizer of `{ref.name}` is missing: it is in its corpus `{ref.plan.corpus}`",
            where="the corpus was removed, or prepared again with another tokenizer",
            fix="set `tokenizer` to a folder with the tokenizer of the earlier run",
        )
    return tokenizer


def _spelled(name: str, loaded: LoadedConfig) -> str:
    """Return a local path relative to the config's folder, unless it is absolute; return any other name unchanged."""
    path = Path(name).expanduser()
    if path.is_absolute() or not path.exists():
        return name
    # Links are followed up to the last part, because `..` in the path of a run may follow a link.
    return relative_path(path.parent.resolve() / path.name, loaded.base.resolve())
