"""The engines `trl` and `unsloth`: check the settings, start the child process, and report what it sends to the run.

RUN/engine/   code/ (what runs in the child)   log.txt   checkpoint-12/ (the trainer's own, until the run is finished)
"""

import json
import os
import shlex
import shutil
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tunewell
from tunewell.config.extensions import METHODS
from tunewell.config.load import LoadedConfig
from tunewell.core.child import Child, run
from tunewell.core.errors import UserError
from tunewell.core.files import open_file, parse_json, read_data, read_text, stable_json, write_atomic
from tunewell.core.progress import Progress
from tunewell.data.batches import spread_evenly
from tunewell.data.corpus.reader import Corpus
from tunewell.model_files.files import locate
from tunewell.model_files.presets import is_preset
from tunewell.models.load import DTYPES, LoadOptions, load_model
from tunewell.models.support import quiet
from tunewell.records.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunewell.records.healing import HealingEntry, Severity
from tunewell.records.plan import Chosen, EngineRecord, Plan
from tunewell.runs.engines import EngineRun
from tunewell.training.engine import EXIT_STOPPED
from tunewell.training.events import StepTaken
from tunewell.training.run import Ending
from tunewell.training.signals import Signals

_FOLDER = "engine"
_ROOT = Path(tunewell.__file__).parents[1]
_COPIED = ("tunewell/training/health.py", "tunewell/features/engines/observer.py")
_SETTINGS = read_data(__file__, "settings.toml")
_VERSIONS = """
import importlib.metadata, json
print(json.dumps({str(one.name).lower(): one.version for one in importlib.metadata.distributions()}))
"""
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
        named = loaded.config.engine_python
        python = str(loaded.path(named).absolute()) if named else sys.executable
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
            command, visible = [run.plan.engine.python, str(worker)], _visible(run.plan.device.value)
            run.recorder(Progress(f"starting {self.title}"))
            with (
                Child(command, environment=visible, has_session=True, log=folder / "log.txt") as child,
                Signals(is_installed=run.options.owns_process, on_request=lambda: child.send("stop")) as signals,
            ):
                child.send(request)
                ending = self._follow(child, run, signals)
            return ending
        finally:
            left = [folder] if not run.has_started and not run.progress.step else folder.glob("rows*")
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
            lines.append("  `method.layers` with `method.kind: full`: the engine trains all layers")
        return lines

    def _request(self, run: EngineRun, folder: Path) -> dict[str, Any]:
        """Write the rows, and return what the child needs to know."""
        plan, config, corpus, step = run.plan, run.config, run.corpus, run.progress.step
        rows, longest, schedule = folder / "rows", _longest(corpus), plan.schedule.value
        rows.mkdir(exist_ok=True)
        evaluated = spread_evenly(len(corpus.evaluated), config.evaluate.max_documents).tolist()
        _write_rows(rows / "train.jsonl", corpus, range(len(corpus)))
        _write_rows(rows / "evaluated.jsonl", corpus.evaluated, evaluated)
        micro, adapter = plan.micro_batch_tokens.value // longest, None
        if plan.method.value != "full":
            adapter = {name: value for name, value in _values("adapter", run).items() if value not in ((), "all")}
            adapter["r"], adapter["lora_alpha"] = config.method.rank_and_alpha
            if plan.method.value == "dora":
                adapter["use_dora"] = True
        return {
            "engine": self.name,
            "model": _base_model(run, rows / "base"),
            "tokenizer": str((corpus.path / "tokenizer").absolute()),
            "dtype": str(_dtype(plan)).removeprefix("torch."),
            "threads": plan.threads.value,
            "rows": str(rows),
            "max_length": longest,
            "adapter": adapter,
            "recompute": config.train.recompute,
            "is_quantized": plan.quantized is not None,
            "resume": str(folder / f"checkpoint-{step}") if step else None,
            "arguments": {
                **_SETTINGS["fixed"],
                **_values("arguments", run),
                "lr_scheduler_type": _SETTINGS["schedules"].get(schedule, schedule),
                "output_dir": str(folder),
                "per_device_train_batch_size": micro,
                "per_device_eval_batch_size": micro,
                "gradient_accumulation_steps": (plan.batch_documents.value or 1) // micro,
                "max_length": None,
                "bf16": plan.precision.value == "bf16",
                "fp16": plan.precision.value == "fp16",
                "use_cpu": plan.device.value == "cpu",
                "gradient_checkpointing": config.train.recompute != "off",
                "eval_strategy": "steps" if evaluated else "no",
                "eval_on_start": bool(evaluated) and not step,
            },
            "context": {
                **_values("context", run),
                "device": plan.device.value.partition(":")[0],
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
                    run.step(StepTaken(**content, batch_sha256=""))
                case "evaluated":
                    run.evaluate(**content)
                case "found":
                    run.heal(entry := _entry(**content))
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
        if failure and not run.has_started:
            assert run.plan.engine is not None
            raise UserError(
                f"{self.title} could not start: {failure}",
                where=", ".join(map(" ".join, run.plan.engine.versions.items())),
                fix="compare these versions with those that `docs/guides/engines.md` names, or leave out `engine`",
            )
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


def _longest(corpus: Corpus) -> int:
    return int(corpus.index["length"].max())


def _dtype(plan: Plan) -> torch.dtype:
    return METHODS.load(plan.method.value).load_dtype(DTYPES[plan.precision.value])


def _write_rows(path: Path, split: Any, documents: Any) -> None:
    """Write the token ids and labels of documents as lines of JSON."""
    with open_file(path, "w") as file:
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
    """Copy what runs in the child to a folder, as a package of the same name. Return its main program."""
    for name in _COPIED:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(folder).parents[:-1]:
            write_atomic(folder / parent / "__init__.py", "")  # an installed tunewell must not come first
        write_atomic(path, read_text(_ROOT / name))
    write_atomic(folder / "worker.py", read_text(Path(__file__).with_name("worker.py")))
    return folder / "worker.py"


def _values(table: str, run: EngineRun) -> dict[str, Any]:
    """Return the values of a run that a table of the settings names."""
    return {name: attrgetter(path)(run) for name, path in _SETTINGS[table].items()}


def _entry(*, severity: Severity, words: str, place: str | None, **finding: Any) -> HealingEntry:
    """Return the entry of a finding in the child, which stops at a fault."""
    is_fault = severity == "fault"
    words = f"{words}{f' ({place})' if place else ''}{': the run stops' if is_fault else ''}"
    action = "stop" if is_fault else "none"
    return HealingEntry(severity=severity, words=words, place=place, action=action, **finding)


def _visible(device: str) -> dict[str, str]:
    """Return the variable that lets the child see only its GPU: with several, its trainer would use all of them."""
    kind, _, index = device.partition(":")
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": names[int(index or 0)] or index or "0"} if kind == "cuda" else {}
