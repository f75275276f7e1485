"""The engines `trl` and `unsloth`: check the settings, start the child process, and report what it sends to the run.

RUN/engine/   code/ (what runs in the child)   log.txt   checkpoint-12/ (the trainer's own, until the run is finished)
"""

import json
import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tunewell.config.extensions import METHODS
from tunewell.config.load import LoadedConfig
from tunewell.core.child import Child, run
from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_data, read_text, stable_json, write_atomic
from tunewell.core.progress import Progress
from tunewell.data.batches import spread_evenly
from tunewell.data.corpus.reader import Corpus
from tunewell.model_files.files import locate
from tunewell.model_files.presets import is_preset
from tunewell.models.load import DTYPES, LoadOptions, load_model
from tunewell.models.support import quiet
from tunewell.records.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunewell.records.healing import HealingEntry
from tunewell.records.plan import Chosen, EngineRecord, Plan
from tunewell.runs.engines import EngineRun
from tunewell.training.engine import EXIT_STOPPED
from tunewell.training.events import StepTaken
from tunewell.training.run import Ending
from tunewell.training.signals import Signals

_FOLDER, _PACKAGE = "engine", "tunewell.features.engines"
_COPIED = ("tunewell.training.health", "tunewell.training.finite_checks", f"{_PACKAGE}.observer")
_SETTINGS = read_data(__file__, "settings.toml")
_VERSIONS = (
    "import json, importlib.metadata as m; print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
)
_ADVICE = "Lower `train.learning_rate`, or train with `engine: native`, which leaves out the rows at fault and goes on."


class Trl:
    """`SFTTrainer` of TRL."""

    name, title = "trl", "TRL"
    packages = ("trl", "peft", "transformers", "torch")

    def require(self, loaded: LoadedConfig) -> EngineRecord:
        """Return the versions of the engine. Raise UserError if it is missing, or for settings that it cannot use."""
        if refused := self._refused(loaded):
            raise UserError(
                "\n".join([f"`engine: {self.name}` cannot use these settings:", *refused]),
                fix="change them, or leave out `engine`",
            )
        python = _python(loaded)
        try:
            found = json.loads(run([python, "-c", _VERSIONS], seconds=60).out)
        except (OSError, TimeoutError, ValueError) as error:
            raise UserError(
                f"`{python}` is not a working Python program",
                where=loaded.origin("engine_python"),
                fix="set `engine_python` to the Python program of an environment, e.g. `venv/bin/python`",
            ) from error
        if missing := [name for name in self.packages if name not in found]:
            raise UserError(
                f"`engine: {self.name}` needs {', '.join(f'`{name}`' for name in missing)}",
                where=f"not installed in the environment of `{python}`",
                fix=f"{shlex.quote(python)} -m pip install {' '.join(missing)}",
            )
        return EngineRecord(name=self.name, versions={name: found[name] for name in self.packages}, python=python)

    def limits(self, loaded: LoadedConfig) -> list[str]:
        """Return what the engine cannot do, and the settings that have no effect."""
        ignored = [f"`{key}` ({why})" for key, why in _SETTINGS["ignored"].items() if key in loaded.origins]
        return [
            f"{self.title} takes the steps: the order of the rows, optimizer and schedule are its own; rows are "
            "padded, not packed; a NaN stops the run before the update, and nothing is repaired; `--resume` goes on "
            "from its own checkpoint, and may not repeat the run exactly",
            *([f"no effect with `engine: {self.name}`: {', '.join(ignored)}"] if ignored else []),
        ]

    def adapt(self, plan: Plan, corpus: Corpus) -> Plan:
        """Return the plan with micro-batches of whole, padded documents, and a checkpoint of every evaluation."""
        size, longest = plan.batch_documents.value or 1, _longest(corpus)
        most = max(1, plan.micro_batch_tokens.value // longest)
        number = max(part for part in range(1, min(size, most) + 1) if size % part == 0)
        update: dict[str, Any] = {
            "packing": Chosen("padded", because=f"{self.title} pads rows to the longest of a micro-batch"),
            "compile": Chosen("off", because=f"{self.title} does not compile"),
            "micro_batch_tokens": Chosen(number * longest, because=f"{number} padded rows, which divide a step"),
        }
        if len(corpus.selection):
            update["save_every"] = Chosen(plan.evaluate_every.value, because="the best evaluation is a checkpoint")
        return plan.model_copy(update=update)

    def can_resume(self, folder: Path, step: int) -> bool:
        """Return whether the trainer has a checkpoint of this step."""
        return (folder / _FOLDER / f"checkpoint-{step}" / "trainer_state.json").is_file()

    def train(self, run: EngineRun) -> Ending:
        """Train in a child process. Raise UserError if it fails before the first step."""
        folder = (run.folder / _FOLDER).absolute()
        folder.mkdir(exist_ok=True)
        ending = None
        try:
            request, worker = self._request(run, folder), _copy_code(folder / "code")
            assert run.plan.engine is not None
            environment, log = _visible(run.plan.device.value), folder / "log.txt"
            run.recorder(Progress(f"starting {self.title}"))
            with (
                Child([run.plan.engine.python, str(worker)], environment=environment, log=log) as child,
                Signals(is_installed=run.options.owns_process, on_request=lambda: child.send("stop")) as signals,
            ):
                child.send(request)
                ending = self._follow(child, run, signals)
            return ending
        finally:
            left = [folder] if not run.num_embeddings and not run.progress.step else folder.glob("rows*")
            for path in [*left, *(folder.glob("checkpoint-*") if ending and ending.status == "finished" else [])]:
                shutil.rmtree(path)

    def _refused(self, loaded: LoadedConfig) -> list[str]:
        config, lines = loaded.config, list[str]()
        for rule in _SETTINGS["refused"]:
            value: Any = attrgetter(key := rule["key"])(config)
            value = "none" if value is None else list(value) if isinstance(value, tuple) else value
            if value not in rule["values"] and self.name in rule.get("by", [self.name]):
                lines.append(f"  `{key}: {value}` ({loaded.origin(key)}): {rule['because']}")
        if config.method.kind == "full" and config.method.layers != "all":
            lines.append("  `method.layers` with `kind: full`: all layers are trained there")
        return lines

    def _request(self, run: EngineRun, folder: Path) -> dict[str, Any]:
        """Write the rows, and return what the child needs to know."""
        plan, config, corpus, step = run.plan, run.loaded.config, run.corpus, run.progress.step
        rows = folder / "rows"
        rows.mkdir(exist_ok=True)
        evaluated = spread_evenly(len(corpus.evaluated), config.evaluate.max_documents).tolist()
        _write_rows(rows / "train.jsonl", corpus, range(len(corpus)))
        _write_rows(rows / "evaluated.jsonl", corpus.evaluated, evaluated)
        rank, alpha = config.method.rank_and_alpha
        adapter = {name: attrgetter(key)(config) for name, key in _SETTINGS["adapter"].items()}
        adapter = {name: value for name, value in adapter.items() if value not in ((), "all")}
        has_dora = {"use_dora": True} if plan.method.value == "dora" else {}
        number, micro = plan.batch_documents.value or 1, plan.micro_batch_tokens.value // _longest(corpus)
        schedule = plan.schedule.value
        return {
            "engine": self.name,
            "model": _base_model(run, rows / "base"),
            "tokenizer": str((corpus.path / "tokenizer").absolute()),
            "dtype": str(_dtype(plan)).removeprefix("torch."),
            "threads": plan.threads.value,
            "rows": str(rows),
            "max_length": _longest(corpus),
            "adapter": None
            if plan.method.value == "full"
            else {"r": rank, "lora_alpha": alpha, "bias": "none", **has_dora, **adapter},
            "recompute": config.train.recompute,
            "is_quantized": plan.quantized is not None,
            "resume": str(folder / f"checkpoint-{step}") if step else None,
            "arguments": {
                **_SETTINGS["fixed"],
                **{name: getattr(plan, field).value for name, field in _SETTINGS["planned"].items()},
                **{name: attrgetter(key)(config) for name, key in _SETTINGS["configured"].items()},
                "lr_scheduler_type": _SETTINGS["schedules"].get(schedule, schedule),
                "output_dir": str(folder),
                "per_device_train_batch_size": micro,
                "per_device_eval_batch_size": micro,
                "gradient_accumulation_steps": number // micro,
                "max_length": None,
                "bf16": plan.precision.value == "bf16",
                "fp16": plan.precision.value == "fp16",
                "use_cpu": plan.device.value == "cpu",
                "gradient_checkpointing": config.train.recompute != "off",
                "eval_strategy": "steps" if evaluated else "no",
                "eval_on_start": bool(evaluated) and not step,
                "save_total_limit": max(2, config.checkpoints.keep),
            },
            "context": {
                "precision": plan.precision.value,
                "device": plan.device.value.partition(":")[0],
                "max_grad_norm": config.train.max_grad_norm,
                "spike_factor": config.healing.spike_factor,
                "is_from_scratch": is_preset(plan.model),
            },
        }

    def _follow(self, child: Child, run: EngineRun, signals: Signals) -> Ending:
        """Report what the child sends, until it ends. Raise UserError if it fails before the first step."""
        fault, failure = None, ""
        for message in child.messages():
            run.beat()
            ((kind, content),) = message.items()
            match kind:
                case "started":
                    run.start(**content)
                case "step":
                    run.step(StepTaken(**content))
                case "evaluated":
                    run.evaluate(**content)
                case "found":
                    run.heal(entry := HealingEntry(**content))
                    fault = entry if entry.action == "stop" else fault
                case "saved":
                    self._save(run, Path(content))
                    child.send("saved")
                case "failed":
                    failure = content
                case _:
                    pass  # a sign of life
        ended = child.wait()
        if fault is not None:
            return Ending("stopped", fault.words, EXIT_STOPPED, advice=_ADVICE)
        if ended.code and not failure:
            failure = f"its process {ended}"
        if failure and not run.num_embeddings:
            versions = run.plan.engine.versions.items() if run.plan.engine else ()
            where = ", ".join(f"{name} {version}" for name, version in versions)
            fix = "compare these versions with those that `docs/guides/engines.md` names, or leave out `engine`"
            raise UserError(f"{self.title} could not start: {failure}", where=where, fix=fix)
        if failure:
            advice = f"`{_FOLDER}/log.txt` in the run folder has all that {self.title} printed."
            return Ending("failed", f"{self.title} failed: {failure}", EXIT_STOPPED, advice=advice, is_resumable=True)
        if signals.asked and run.progress.step < run.plan.num_steps.value:
            code = signals.exit_code or 0
            return Ending("interrupted", f"stopped by {signals.asked}", code, signals.asked, is_resumable=True)
        if trouble := run.checkpoints.trouble:
            lost = f"the last checkpoint was not saved: {trouble}"
            return Ending("stopped", lost, EXIT_STOPPED, advice="Free disk space, then resume.", is_resumable=True)
        return Ending("finished", f"finished all {run.progress.step} steps")

    def _save(self, run: EngineRun, folder: Path) -> None:
        """Write the weights in a checkpoint of the trainer as a checkpoint of the run."""
        weights = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        if run.plan.method.value == "full":
            run.save(weights, "model.safetensors", {"config.json": read_text(folder / "config.json")})
        else:
            config = parse_json(read_text(folder / ADAPTER_CONFIG)) | {"base_model_name_or_path": run.plan.model}
            run.save(weights, ADAPTER_WEIGHTS, {ADAPTER_CONFIG: stable_json(config)})


class Unsloth(Trl):
    """Unsloth: its model and kernels in TRL's `SFTTrainer`."""

    name, title = "unsloth", "Unsloth"
    packages = ("unsloth", *Trl.packages)


def _python(loaded: LoadedConfig) -> str:
    """Return the Python program of the engine. Links are not followed: that of a venv is one."""
    if (named := loaded.config.engine_python) is None:
        return sys.executable
    path = loaded.base / Path(named).expanduser()
    return str(path.absolute()) if path.exists() else shutil.which(named) or named


def _longest(corpus: Corpus) -> int:
    return int(corpus.index["length"].max())


def _dtype(plan: Plan) -> torch.dtype:
    return METHODS.load(plan.method.value).load_dtype(DTYPES[plan.precision.value])


def _write_rows(path: Path, split: Any, documents: Any) -> None:
    """Write the token ids and labels of documents as lines of JSON."""
    with path.open("w") as file:
        for document in documents:
            ids, labels = split.arrays(document)
            file.write(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}) + "\n")


def _base_model(run: EngineRun, folder: Path) -> str:
    """Return a folder or hub id that transformers can load. Other models are written to a folder first."""
    name = run.loaded.seen(run.plan.model)
    files = None if is_preset(name) else locate(name)
    names = files.read_object("config.json").get("architectures") if files and not files.gguf else None
    if files and names and names[0].endswith("ForCausalLM"):
        return name if files.origin == "hub" else str(Path(name).absolute())
    with run.recorder.stage("load", "writing the base model for the engine"), quiet():
        options = LoadOptions(
            name,
            run.corpus.path / "tokenizer",
            torch.device("cpu"),
            _dtype(run.plan),
            attention=None,
            is_packed=False,
            seed=run.plan.seed,
            allow_pickle=run.options.allow_pickle,
        )
        load_model(options, may_share=False).model.save_pretrained(folder)
    return str(folder)


def _copy_code(folder: Path) -> Path:
    """Copy the modules that run in the child to a folder, as a package of their names. Return its main program."""
    for name in _COPIED:
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _source(name))
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()  # an installed tunewell must not come first
    worker = folder / "worker.py"
    write_atomic(worker, _source(f"{_PACKAGE}.worker"))
    return worker


def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _visible(device: str) -> dict[str, str]:
    """Return the variable that lets the child see only its GPU: with several, its trainer would use all of them."""
    kind, _, index = device.partition(":")
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": names[int(index or 0)] or index or "0"} if kind == "cuda" else {}
