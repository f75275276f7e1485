"""`tunewell eject`: write a folder with a script, the tokenised rows and the first weights of a run."""

import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.config.extensions import METHODS
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, publish_folder, read_data, read_text, require_output_path, stable_json
from tunewell.core.html import render
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.version import made_by
from tunewell.data.batches import TokenizedDocuments
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.replay import WithReplay
from tunewell.data.sources.arrow import write_lists
from tunewell.export.targets.merged import save_plain
from tunewell.methods.base import AdapterMethod
from tunewell.model_files.files import locate
from tunewell.model_files.presets import is_preset
from tunewell.models.base_content import content_changes
from tunewell.models.load import DTYPES, load_model
from tunewell.planning.plan import make_order
from tunewell.planning.recommendation import with_recommended
from tunewell.records.base_model import BaseContent, read_base
from tunewell.records.events import read_events
from tunewell.records.healing import read_healing
from tunewell.records.manifest import MANIFEST
from tunewell.records.plan import Chosen, read_plan
from tunewell.records.rundir import RUN_CONFIG
from tunewell.runs.resolve import current_run
from tunewell.runs.state import EVENTS
from tunewell.training.build import RunInputs, load_run_model
from tunewell.training.distributed import World
from tunewell.training.replay import REPLAY

_NUM_LOSSES = 20
_CHUNK = 1000
_COLUMNS = ["input_ids", "labels"]
_FACTS = read_data(__file__, "trl.toml")


@dataclass(frozen=True)
class Ejected:
    """The written folder."""

    folder: Path
    model: str
    """The model in the script: a name, a path or `model`, if it lies in the folder."""
    num_steps: int
    num_losses: int
    """Losses of the run that `train.py --check` compares."""
    notes: list[str]
    """What differs from the run."""


def eject(
    run: str | Path | None = None,
    *,
    out: str | Path = "ejected",
    allow_pickle: bool = False,
    progress: ProgressListener = silent,
) -> Ejected:
    """Write a run as a script for TRL, of a run with any status.

    Raises UserError if the run has a setting that TRL lacks, if its corpus is missing or has other rows than the run,
    or if `out` exists.
    """
    folder = Path(run).expanduser() if run is not None else current_run()
    out = Path(out).expanduser()
    require_output_path(out)
    if out.exists():
        raise UserError(f"`{out}` exists", fix="name another folder: `--out FOLDER`")
    parts = _inputs(folder, allow_pickle=allow_pickle)
    notes = _differences(parts)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tunewell-eject-", dir=out.parent) as place:
        staged = Path(place) / out.name
        staged.mkdir()
        progress(Progress("writing the rows and the order of the run"))
        losses = _write_data(staged, parts)
        progress(Progress("writing the first weights"))
        facts = _write_weights(staged, parts)
        _write_texts(staged, parts, num_losses=len(losses), notes=notes, **facts)
        publish_folder(staged, out)
    return Ejected(out, facts["model"], parts.plan.num_steps.value, len(losses), notes)


def _inputs(run: Path, *, allow_pickle: bool) -> RunInputs:
    """Return what the run was built from, for the CPU of this machine."""
    plan, loaded = read_plan(run), load_config(run / RUN_CONFIG)
    if changes := content_changes(model := loaded.seen(plan.model), read_base(run) or BaseContent()):
        raise UserError(f"the base model `{model}` has changed since the run was started", where="; ".join(changes))
    folder = loaded.path(loaded.config.corpus)
    again = f"restore the rows: `tunewell prepare --config {run / RUN_CONFIG} --out {folder}`"
    if not (folder / MANIFEST).is_file():
        raise UserError(f"the corpus of the run is missing: `{folder}`", fix=again)
    corpus = open_corpus(folder, verify=True)
    if corpus.manifest.corpus_sha256 != plan.corpus_sha256:
        raise UserError(f"the corpus `{folder}` has other rows than the run", fix=again)
    order = make_order(
        corpus.index["length"].astype("int64"),
        plan.replay.value if plan.replay else 0.0,
        seed=plan.seed,
        corpus_sha256=plan.corpus_sha256,
        batch_tokens=plan.batch_tokens.value,
        batch_documents=plan.batch_documents.value,
    )
    here: dict[str, Any] = {"device": Chosen("cpu", ""), "attention": Chosen("sdpa", "")}
    if plan.quantized is not None:  # a cost of None would be measured now
        here["quantized"] = plan.quantized.model_copy(update={"loss": plan.quantized.loss or 0.0})
    return RunInputs(
        loaded=with_recommended(loaded, corpus.manifest, plan),
        plan=plan.model_copy(update=here),
        corpus=corpus,
        order=order,
        folder=run,
        rank_folder=run,
        world=World(),
        listener=lambda event: None,
        allow_pickle=allow_pickle,
    )


def _differences(parts: RunInputs) -> list[str]:
    """Return what differs from the run; raise UserError for an engine, method or optimizer without a counterpart."""
    plan, config = parts.plan, parts.config
    used = {"engine": config.engine, "method.kind": plan.method.value, "train.optimizer": config.train.optimizer}
    for key, name in used.items():
        if name not in _FACTS["supported"]:
            why = _FACTS["refused"].get(name, "it is an extension of tunewell")
            raise UserError(f"`{key}: {name}` cannot be ejected: {why}", fix=_FACTS["fix"])
    held = {
        "adamw8bit": config.train.optimizer == "adamw8bit",
        "masters": config.train.masters == "bf16",
        "int8": plan.quantized is not None and plan.quantized.kind == "int8" and not plan.quantized.is_saved,
        "dropout": config.method.dropout > 0 and METHODS.entry(plan.method.value).is_adapter,
        "offload": config.train.recompute == "offload",
        "healing": bool(read_healing(parts.folder)),
    }
    return [text for name, text in _FACTS["differences"].items() if held[name]]


def _write_data(folder: Path, parts: RunInputs) -> list[float]:
    """Write the documents, and those of each step. Return the first losses of the run.

    Raises UserError if the order is not the one that the run logged.
    """
    documents, path, data = _documents(parts), parts.folder / EVENTS, folder / "data"
    logged = {own["step"]: own for own in (read_events(path) if path.is_file() else []) if own["kind"] == "step"}
    steps: list[Any] = []
    for number in range(parts.plan.num_steps.value):
        step = parts.order.step(number)
        if step.sha256 != logged.get(number + 1, {}).get("batch_sha256", step.sha256):
            raise UserError(f"the order of the rows cannot be repeated: step {number + 1:,} of the run had other rows")
        lengths = np.asarray(documents.index["length"])[step.documents]
        steps.append(step.documents[np.argsort(-lengths, kind="stable")])
    data.mkdir()
    _write(data / "train.arrow", documents)
    if len(parts.corpus.evaluated):
        _write(data / "held_out.arrow", parts.corpus.evaluated)
    write_lists(data / "steps.arrow", [{"documents": _as_lists(steps)}], ["documents"])
    events = (logged.get(number, {}) for number in range(1, _NUM_LOSSES + 1))
    losses = [float(event["loss"]) for event in takewhile(_is_repeatable, events)]
    (folder / "first_losses.json").write_text(stable_json(losses), encoding="utf-8")
    return losses


def _is_repeatable(step: Mapping[str, Any]) -> bool:
    """Return whether a logged step has a loss and changed the weights."""
    return math.isfinite(float(step.get("loss", "nan"))) and not step.get("was_skipped")


def _documents(parts: RunInputs) -> TokenizedDocuments:
    if not parts.order.num_replayed:
        return parts.corpus
    path = parts.folder / REPLAY
    if not path.is_file():
        raise UserError(
            "the run was not started: the everyday prompts of its replay are not answered yet",
            where=str(path),
            fix="start the run, and eject it then; or set `train.replay: 0`",
        )
    return WithReplay(parts.corpus, parse_json(read_text(path)))


def _write(path: Path, documents: TokenizedDocuments) -> None:
    numbers = range(len(documents))
    chunks = ([documents.arrays(index) for index in numbers[at : at + _CHUNK]] for at in numbers[::_CHUNK])
    columns = (dict(zip(_COLUMNS, map(_as_lists, zip(*chunk, strict=True)), strict=True)) for chunk in chunks)
    write_lists(path, columns, _COLUMNS)


def _as_lists(arrays: Any) -> tuple[Any, Any]:
    """Return arrays as offsets and values."""
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return offsets, np.concatenate(arrays).astype(np.int32)


def _write_weights(folder: Path, parts: RunInputs) -> dict[str, Any]:
    """Write the adapter before the first step, and a model that transformers cannot load by its name."""
    options, found, method = load_run_model(parts)
    name = _loadable(parts.model)
    if name is None or options.added_tokens or found.text_prefix:
        name = "model"
        # The model again, because the method has changed its layers.
        plain = load_model(replace(options, quantized=None), may_share=False).model
        save_plain(plain, folder / name, options.dtype)
    if isinstance(method, AdapterMethod):
        (folder / "adapter").mkdir()
        method.files(name).write(folder / "adapter")
    return {
        "model": name,
        "has_router_loss": bool(getattr(found.model.config, "output_router_logits", False)),
        "trains_embedding": not isinstance(method, AdapterMethod) or not method.has_base,
    }


def _loadable(model: str) -> str | None:
    """Return what transformers loads a model by, or None for a GGUF file, a preset and the like."""
    if is_preset(model):
        return None
    files, path = locate(model), Path(model).expanduser()
    if files.origin == "hub":
        return model
    return str(path.resolve()) if files.gguf is None and any(path.glob("*.safetensors")) else None


def _write_texts(folder: Path, parts: RunInputs, *, notes: list[str], **facts: Any) -> None:
    """Write the script, its requirements and the README."""
    plan, train, layers = parts.plan, parts.config.train, parts.config.method.layers
    method, precision, base = METHODS.entry(plan.method.value), plan.precision.value, plan.quantized
    quantization = base.bnb_arguments if base else ""
    values: dict[str, Any] = {
        "name": re.sub(r"[^\w.-]", "_", parts.folder.resolve().name),
        "run": parts.folder,
        "plan": plan,
        "train": train,
        "method": method,
        "quantization": quantization,
        "is_quantized": bool(quantization or (base and base.is_saved)),
        "layers": None if layers == "all" else list(layers),
        "dtype": DTYPES[precision if method.is_adapter else "fp32"],
        "rows_at_once": max(1, plan.micro_batch_tokens.value // int(parts.order.lengths.max())),
        "is_bf16": precision == "bf16" and not method.is_adapter,
        "has_held_out": len(parts.corpus.evaluated) > 0,
        "tolerance": _FACTS["tolerances"]["other" if notes else precision],
        "notes": notes,
        "made_by": made_by(),
    }
    for name in ("train.py", "README.md"):
        text = render("tunewell.features.eject", f"{name}.jinja", **values, **facts)
        (folder / name).write_text(text.rstrip() + "\n", encoding="utf-8")
    shutil.copytree(parts.corpus.path / "tokenizer", folder / "tokenizer")
    packages = ["torch", "transformers", "trl", "datasets", "accelerate"]
    packages += ["peft"] * method.is_adapter
    packages += ["bitsandbytes"] * bool(values["is_quantized"] or train.optimizer == "adamw8bit")
    pins = [f"{name}=={_FACTS['tested'].get(name) or version(name).partition('+')[0]}\n" for name in packages]
    (folder / "requirements.txt").write_text("".join(pins), encoding="utf-8")
