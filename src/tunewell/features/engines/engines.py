"""The engines `trl` and `unsloth`: check the settings, start the child process, and report what it sends to the run.

    RUN/engine/   code/ (what runs in the child)   log.txt   checkpoint-12/ (the trainer's own, until the run is finished)
"""

import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tunewell.config.extensions import METHODS
from tunewell.config.keys import parse_key
from tunewell.config.load import LoadedConfig
from tunewell.core.child import Child, run
from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_data, read_text, stable_json, write_atomic
from tunewell.data.batches import spread_evenly
from tunewell.data.corpus.reader import Corpus
from tunewell.model_files.files import locate
from tunewell.model_files.presets import is_preset
from tunewell.models.load import DTYPES, LoadOptions, load_model
from tunewell.records.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunewell.records.healing import HealingEntry
from tunewell.records.plan import Chosen, EngineRecord, Plan
from tunewell.runs.engines import EngineRun
from tunewell.training.engine import EXIT_STOPPED
from tunewell.training.events import StepTaken
from tunewell.training.run import Ending
from tunewell.training.signals import Signals

_FOLDER, _ROWS, _EVALUATED, _BASE = "engine", "rows.jsonl", "evaluated.jsonl", "base"
_PACKAGE = "tunewell.features.engines"
_COPIED = ("tunewell.training.health", "tunewell.training.finite_checks", f"{_PACKAGE}.observer")
_SETTINGS = read_data(__file__, "settings.toml")
_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_OLDEST_PYTHON = (3, 10)
_ADVICE = "Lower `train.learning_rate`, or train with `engine: native`, which leaves out the rows at fault and goes on."


class Trl:
    """`SFTTrainer` of TRL."""

    name, title = "trl", "TRL"
    packages = ("trl", "peft", "transformers", "torch")
    tested = ("0.26.1", "1.16")
    methods = ("lora", "dora", "full")

    def require(self, loaded: LoadedConfig) -> EngineRecord:
        """Return the versions of the engine. Raise UserError if it is missing, or for settings that it cannot use."""
        if refused := list(self._refused(loaded)):
            raise UserError(
                f"`engine: {self.name}` cannot use {len(refused)} of the settings:\n" + "\n".join(refused),
                fix="change them, or leave out `engine`",
            )
        python = _python(loaded)
        try:
            ended = run([python, "-c", _VERSIONS, *self.packages], seconds=60)
            found: dict[str, str] = json.loads(ended.out)
        except (OSError, TimeoutError, ValueError) as error:
            raise UserError(
                f"`{python}` is not a Python program that works",
                where=loaded.origin("engine_python"),
                fix="set `engine_python` to the Python program of an environment, e.g. `venv/bin/python`",
            ) from error
        version = found.pop("python")
        if missing := [name for name in self.packages if name not in found]:
            raise UserError(
                f"`engine: {self.name}` needs {' and '.join(f'`{name}`' for name in missing)}",
                where=f"`{python}` does not have them",
                fix=f"{python} -m pip install {' '.join(missing)}",
            )
        if tuple(map(int, version.split(".")[:2])) < _OLDEST_PYTHON:
            raise UserError(f"`{python}` is Python {version}; the engines need 3.10", where=loaded.origin("engine_python"))
        return EngineRecord(name=self.name, versions=found, python=python)

    def limits(self, loaded: LoadedConfig) -> list[str]:
        """Return what the engine cannot do, and the settings that have no effect."""
        ignored = [f"`{key}` ({why})" for key, why in _SETTINGS["ignored"].items() if key in loaded.origins]
        return [
            f"{self.title} takes the steps: its own order of the rows, optimizer and schedule; documents are padded, not "
            "packed; a NaN stops the run before the update, and nothing is repaired; `--resume` goes on from the "
            "trainer's own checkpoint, which is not exact",
            *([f"no effect with `engine: {self.name}`: {', '.join(ignored)}"] if ignored else []),
        ]

    def adapt(self, plan: Plan, corpus: Corpus) -> Plan:
        """Return the plan with micro-batches of whole, padded documents, and the checkpoints that the trainer writes."""
        if corpus.manifest.tokenizer.added_by_us:
            raise UserError(f"`engine: {self.name}` cannot add tokens", fix="remove `template.add_missing_tokens`")
        number = self._micro_batch(plan, corpus)
        micro = Chosen(number * _longest(corpus), because=f"{number} padded documents divide a step")
        update: dict[str, Any] = {
            "packing": Chosen("padded", because=f"{self.title} pads documents to the longest of a micro-batch"),
            "compile": Chosen("off", because=f"{self.title} does not compile"),
            "micro_batch_tokens": micro,
        }
        if len(corpus.selection):
            update["save_every"] = Chosen(plan.evaluate_every.value, because="the best evaluation is a checkpoint")
        return plan.model_copy(update=update)

    def can_resume(self, folder: Path, step: int) -> bool:
        """Return whether the trainer has a checkpoint of this step."""
        return (_checkpoint(folder, step) / "trainer_state.json").is_file()

    def train(self, run: EngineRun) -> Ending:
        """Train in a child process. Raise UserError if it fails before the first step."""
        folder, record = run.folder / _FOLDER, run.plan.engine
        assert record is not None
        has_begun = run.progress.step > 0
        folder.mkdir(exist_ok=True)
        try:
            request = self._request(run, folder)
            worker = _copy_code(folder / "code")
            environment = {"TOKENIZERS_PARALLELISM": "false", **_visible(run.plan.device.value)}
            with Child([record.python, str(worker)], environment=environment, log=folder / "log.txt") as child:
                stop = lambda: child.send("stop")  # noqa: E731
                with Signals(is_installed=run.options.owns_process, on_request=stop) as signals:
                    child.send(request)
                    ending = self._follow(child, run, signals)
            has_begun = run.num_embeddings > 0
        finally:
            for name in (_ROWS, _EVALUATED):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / _BASE, ignore_errors=True)
            if not has_begun and not run.num_embeddings:
                shutil.rmtree(folder, ignore_errors=True)
        if ending.status == "finished":
            for path in folder.glob("checkpoint-*"):
                shutil.rmtree(path)
        return ending

    def _refused(self, loaded: LoadedConfig) -> list[str]:
        lines = []
        for key, rule in _SETTINGS["refused"].items():
            value: Any = loaded.config
            for part in parse_key(key):
                value = getattr(value, str(part))
            value = "none" if value is None else list(value) if isinstance(value, tuple) else value
            allowed = self.methods if key == "method.kind" else rule["values"]
            if value not in allowed and self.name not in rule.get("not_for", ()):
                lines.append(f"  `{key}: {value}` ({loaded.origin(key)}): {rule['because']}")
        config = loaded.config
        if config.train.schedule == "linear" and config.train.min_rate_share:
            lines.append("  `train.min_rate_share` with `schedule: linear`: transformers has no such schedule")
        if config.method.kind == "full" and config.method.layers != "all":
            lines.append("  `method.layers` with `kind: full`: it trains all layers")
        return lines

    def _micro_batch(self, plan: Plan, corpus: Corpus) -> int:
        """Return the documents of a forward pass: the most that fit and divide a step."""
        number = plan.batch_documents.value or 1
        most = max(1, plan.micro_batch_tokens.value // _longest(corpus))
        return max(part for part in range(1, number + 1) if number % part == 0 and part <= max(1, most))

    def _request(self, run: EngineRun, folder: Path) -> dict[str, Any]:
        """Write the rows, and return what the child needs to know."""
        plan, config, corpus = run.plan, run.loaded.config, run.corpus
        _write_rows(folder / _ROWS, corpus, range(len(corpus)))
        evaluated = spread_evenly(len(corpus.evaluated), config.evaluate.max_documents).tolist()
        _write_rows(folder / _EVALUATED, corpus.evaluated, evaluated)
        step, precision = run.progress.step, plan.precision.value
        return {
            "engine": self.name,
            "model": _base_model(run, folder / _BASE),
            "tokenizer": str((corpus.path / "tokenizer").absolute()),
            "dtype": str(METHODS.load(plan.method.value).load_dtype(DTYPES[precision])).removeprefix("torch."),
            "threads": plan.threads.value if plan.device.value == "cpu" else None,
            "rows": str((folder / _ROWS).absolute()),
            "evaluated": str((folder / _EVALUATED).absolute()) if evaluated else None,
            "max_length": _longest(corpus),
            "adapter": None if plan.method.value == "full" else self._adapter(plan, run.loaded),
            "recompute": config.train.recompute,
            "is_quantized": plan.quantized is not None,
            "arguments": self._arguments(run, folder, has_evaluation=bool(evaluated)),
            "resume": str(_checkpoint(run.folder, step).absolute()) if step else None,
            "context": {
                "precision": precision,
                "device": plan.device.value.partition(":")[0],
                "max_grad_norm": config.train.max_grad_norm,
                "spike_factor": config.healing.spike_factor,
                "is_from_scratch": is_preset(plan.model),
            },
        }

    def _adapter(self, plan: Plan, loaded: LoadedConfig) -> dict[str, Any]:
        """Return the settings of the adapter by PEFT's names. A value of None is left out."""
        method = loaded.config.method
        rank, alpha = method.rank_and_alpha
        return {
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": method.dropout,
            "use_rslora": method.rslora,
            "target_modules": "all-linear" if method.targets == "all-linear" else list(method.targets),
            "layers_to_transform": None if method.layers == "all" else list(method.layers),
            "modules_to_save": list(method.modules_to_save) or None,
            "use_dora": plan.method.value == "dora" or None,
            "bias": "none",
        }

    def _arguments(self, run: EngineRun, folder: Path, *, has_evaluation: bool) -> dict[str, Any]:
        """Return the arguments of `SFTConfig`. The child compares them with the signature that is installed."""
        plan, train = run.plan, run.loaded.config.train
        number, micro = plan.batch_documents.value or 1, self._micro_batch(plan, run.corpus)
        is_cosine = plan.schedule.value == "cosine"
        has_minimum = is_cosine and train.min_rate_share > 0
        schedules = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr" if has_minimum else "cosine"}
        return {
            "output_dir": str(folder.absolute()),
            "max_steps": plan.num_steps.value,
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": number // micro,
            "per_device_eval_batch_size": micro,
            "learning_rate": plan.learning_rate.value,
            "lr_scheduler_type": schedules.get(plan.schedule.value, plan.schedule.value),
            "lr_scheduler_kwargs": {"min_lr_rate": train.min_rate_share} if has_minimum else {},
            "warmup_steps": plan.warmup_steps.value,
            "optim": "adamw_torch",
            "weight_decay": train.weight_decay,
            "adam_beta1": train.adam_beta1,
            "adam_beta2": train.adam_beta2,
            "adam_epsilon": train.adam_epsilon,
            "max_grad_norm": 1e30 if train.max_grad_norm is None else train.max_grad_norm,
            "seed": plan.seed,
            "bf16": plan.precision.value == "bf16",
            "fp16": plan.precision.value == "fp16",
            "use_cpu": plan.device.value == "cpu",
            "gradient_checkpointing": train.recompute != "off",
            "eval_strategy": "steps" if has_evaluation else "no",
            "eval_steps": plan.evaluate_every.value,
            "eval_on_start": has_evaluation and not run.progress.step,
            "prediction_loss_only": True,
            "save_strategy": "steps",
            "save_steps": plan.save_every.value,
            "save_total_limit": max(2, run.loaded.config.checkpoints.keep),
            "logging_steps": 10,
            "report_to": "none",
            "disable_tqdm": True,
            "max_length": None,
            "packing": False,
            "dataset_kwargs": {"skip_prepare_dataset": True},
        }

    def _follow(self, child: Child, run: EngineRun, signals: Signals) -> Ending:
        """Report what the child sends, until it ends. Raise UserError if it fails before the first step."""
        fault: HealingEntry | None = None
        failure = ""
        for message in child.messages():
            run.beat()
            content = next(iter(message.values()))
            match next(iter(message)):
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
        if not failure and ended.code:
            failure = f"the process {ended}"
        if failure and not run.num_embeddings:
            raise UserError(
                f"{self.title} could not start: {failure}",
                where=f"{self.title} {run.plan.engine and run.plan.engine.versions[self.packages[0]]}; tested: "
                f"{' and '.join(self.tested) or 'none'}",
                fix="check `engine_python`, and the versions of its packages",
            )
        if failure:
            advice = f"`{_FOLDER}/log.txt` in the run folder has all that {self.title} printed."
            return Ending("failed", f"{self.title} failed: {failure}", 1, advice=advice, is_resumable=True)
        if signals.asked and run.progress.step < run.plan.num_steps.value:
            code = signals.exit_code or 0
            return Ending("interrupted", f"stopped by {signals.asked}", code, signals.asked, is_resumable=True)
        return Ending("finished", f"finished all {run.progress.step} steps")

    def _save(self, run: EngineRun, folder: Path) -> None:
        """Write the weights in a checkpoint of the trainer as a checkpoint of the run."""
        if run.plan.method.value == "full":
            tensors: dict[str, Tensor] = {}
            for path in sorted(folder.glob("*.safetensors")):
                tensors |= load_file(path)
            run.save(tensors, "model.safetensors", {"config.json": read_text(folder / "config.json")})
            return
        config = parse_json(read_text(folder / ADAPTER_CONFIG)) | {"base_model_name_or_path": run.plan.model}
        run.save(load_file(folder / ADAPTER_WEIGHTS), ADAPTER_WEIGHTS, {ADAPTER_CONFIG: stable_json(config)})


class Unsloth(Trl):
    """Unsloth: its model and kernels in TRL's `SFTTrainer`."""

    name, title = "unsloth", "Unsloth"
    packages = ("unsloth", "trl", "peft", "transformers", "torch")
    tested = ()
    methods = ("lora", "full")


def _python(loaded: LoadedConfig) -> str:
    """Return the Python program of the engine. Links are not followed: that of a venv is one."""
    if (named := loaded.config.engine_python) is None:
        return sys.executable
    path = loaded.base / Path(named).expanduser()
    return str(path.absolute()) if path.exists() else shutil.which(named) or named


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / _FOLDER / f"checkpoint-{step}"


def _longest(corpus: Corpus) -> int:
    return int(corpus.index["length"].max())


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
    if files is not None and files.gguf is None and files.origin in ("folder", "hub"):
        names = files.read_object("config.json").get("architectures") or [""]
        if names[0].endswith("ForCausalLM"):
            return str(Path(name).absolute()) if files.origin == "folder" else name
    with run.recorder.stage("load", "writing the base model for the engine"):
        dtype = METHODS.load(run.plan.method.value).load_dtype(DTYPES[run.plan.precision.value])
        options = LoadOptions(
            name,
            run.corpus.path / "tokenizer",
            torch.device("cpu"),
            dtype,
            attention=None,
            is_packed=False,
            seed=run.plan.seed,
            allow_pickle=run.options.allow_pickle,
        )
        load_model(options, may_share=False).model.save_pretrained(folder)
    return str(folder.absolute())


def _copy_code(folder: Path) -> Path:
    """Copy the modules that run in the child to a folder, as a package of their names. Return its main program."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in _COPIED:
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _source(name))
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
    write_atomic(folder / "worker.py", _source(f"{_PACKAGE}.worker"))
    return folder / "worker.py"


def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _visible(device: str) -> dict[str, str]:
    """Return the variable that lets the child see only its GPU: with several, its trainer would use all of them."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": names[int(index or 0)] or index or "0"}
