"""Write the result files of a run: `outcome.json`, the loss curve `loss.svg` and the page `README.md`."""

from dataclasses import dataclass
from pathlib import Path

from tunewell.config.extensions import METHODS
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.plugins import used_plugins
from tunewell.core.redact import redact
from tunewell.core.units import count, duration
from tunewell.data.corpus.reader import Corpus
from tunewell.model_files.files import WEIGHT_SUFFIXES
from tunewell.model_files.presets import is_preset
from tunewell.records.manifest import Manifest
from tunewell.records.plan import Chosen, Plan
from tunewell.records.report import Curve
from tunewell.records.rundir import OUTCOME, RUN_CONFIG, HeldOutLosses, Outcome, write_outcome
from tunewell.runs.loss_curve import write_loss_svg
from tunewell.runs.prediction import make_measurement
from tunewell.runs.result import TrainResult, healing_summary
from tunewell.training.run import Run

_HERE = "In this folder:"
_TUNEWELL_USAGE = """{reason}, so only tunewell can apply the adapter to it. In this folder:

```
tunewell chat .{flag}
tunewell export . --to merged{flag}
```

The second command writes a complete model to `export/merged`, which transformers can load."""


def write_run_files(run: Run, result: TrainResult, plan: Plan, corpus: Corpus, *, allow_pickle: bool) -> None:
    """Write `loss.svg`, `outcome.json` and `README.md`. Add a note for a file that cannot be written."""
    if result.losses:
        path = result.run / "loss.svg"
        curve = Curve(train=result.losses, held_out=result.held_out, best_step=result.best_step)
        try:
            write_loss_svg(path, curve, title=redact(Path(plan.model).name))
            result.artefacts.append((str(path), "the loss curve"))
        except (UserError, OSError) as error:
            # The checkpoints are saved, so a missing picture does not fail the run.
            result.notes.append(f"could not write the loss curve: {error}")
    try:
        write_outcome(result.run, _outcome(result, plan))
        is_adapter = METHODS.entry(plan.method.value).is_adapter
        num_rows = run.learner.model.config.get_text_config().vocab_size
        page = _Readme(result, plan, corpus.manifest, is_adapter, num_rows, allow_pickle)
        write_atomic(result.run / "README.md", redact("\n".join(page.lines())))
    except (UserError, OSError) as error:
        reason = error.what if isinstance(error, UserError) else error.strerror or error
        result.notes.append(f"could not write `{OUTCOME}` or the run's `README.md`: {reason}")


def _outcome(result: TrainResult, plan: Plan) -> Outcome:
    return Outcome(
        made_by=plan.made_by,
        status=result.status,
        reason=result.reason,
        steps=result.steps,
        planned_steps=result.num_steps,
        first_loss=result.first_loss,
        last_loss=result.last_loss,
        held_out=HeldOutLosses(first=result.held_out_first, last=result.held_out_last, best=result.held_out_best),
        best_step=result.best_step,
        seconds=result.seconds,
        stages={name: round(seconds, 3) for name, seconds in result.stages.items()},
        tokens=result.tokens,
        supervised_tokens=result.supervised_tokens,
        artefacts={what: _in_folder(path, result.run) for path, what in result.artefacts},
        notes=result.notes,
        plugins=used_plugins(),
        healing=healing_summary(result.healing),
        advice=result.advice,
        signal=result.signal,
        allowed_changes=result.changes,
        predicted=plan.prediction,
        measured=make_measurement(result, plan.device.value),
    )


def _in_folder(path: str, run: Path) -> str:
    """Return a path relative to the run folder."""
    return Path(path).relative_to(run).as_posix() if Path(path).is_relative_to(run) else path


@dataclass(frozen=True)
class _Readme:
    """The README of a run: the result, how to use the model, the reason for each setting, how to repeat the run."""

    result: TrainResult
    plan: Plan
    manifest: Manifest
    is_adapter: bool
    vocabulary_rows: int
    allow_pickle: bool

    def lines(self) -> list[str]:
        """Return the lines of the page. Every command on the page works in the run folder."""
        result, plan, manifest = self.result, self.plan, self.manifest
        return [
            f"# A run of {plan.made_by}",
            "",
            f"`{plan.model}` was trained with the method `{plan.method.value}` on "
            f"{count(manifest.documents, 'document')} (corpus {manifest.corpus_sha256[:16]}). "
            f"Status: {result.status} ({result.reason}).",
            *self._failure(),
            "",
            "| | first | last |",
            "|---|---|---|",
            f"| loss | {_number(result.first_loss)} | {_number(result.last_loss)} |",
            f"| held-out loss | {_number(result.held_out_first)} | {_number(result.held_out_last)} |",
            "",
            f"{count(result.steps, 'step')}, {count(result.tokens)} tokens, {duration(result.seconds)}, "
            f"{result.tokens_per_second:,.0f} tokens/s while training.",
            "",
            "![loss](loss.svg)",
            "",
            "## Files",
            "",
            *[f"- `{_in_folder(path, result.run)}`: {what}" for path, what in result.artefacts],
            "- `samples.jsonl`: answers to held-out questions, at every evaluation",
            "- `plan.json`: every setting with its reason; `config.yaml`: the settings that were given",
            "",
            "## Use the model",
            "",
            *self._usage(),
            "",
            "## Why these settings",
            "",
            *self._quantization(),
            "| | value | reason |",
            "|---|---|---|",
            *[
                f"| {name.replace('_', ' ')} | {value.value} | {value.because} |"
                for name, value in plan
                if isinstance(value, Chosen)
            ],
            "",
            "## Repeat the run",
            "",
            _HERE,
            "",
            "```",
            f"tunewell train --config config.yaml --out ../another-run{self._pickle_flag}",
            "```",
            "",
            *_section("Problems and remedies", healing_summary(result.healing)),
            *_section("What to change next time", result.advice),
            *_section("Notes", result.notes),
        ]

    def _failure(self) -> list[str]:
        if self.result.status not in ("stopped", "failed"):
            return []
        return ["", "`tunewell diagnose .` in this folder names the failure, its evidence and what to change."]

    @property
    def _pickle_flag(self) -> str:
        return " --allow-pickle" if self.allow_pickle else ""

    def _quantization(self) -> list[str]:
        base = self.plan.quantized
        if base is None:
            return []
        price = f": {base.price}" if base.price else ""
        return [f"The base model is in {base.kind}{price}; {base.because}.", ""]

    def _usage(self) -> list[str]:
        """Return code that loads the checkpoint in transformers, or tunewell commands if transformers cannot."""
        checkpoints = [path for path, _ in self.result.artefacts if "checkpoints" in path]
        if not checkpoints:
            return ["No checkpoint was written."]
        path = _in_folder(checkpoints[0], self.result.run)
        config = load_config(self.result.run / RUN_CONFIG).config
        model = config.model or ""
        if not self.is_adapter:
            return _loading_code(f"model = AutoModelForCausalLM.from_pretrained({path!r})", config.corpus)
        if reason := _reason_for_tunewell(model):
            return _TUNEWELL_USAGE.format(reason=reason, flag=self._pickle_flag).splitlines()
        quantized = self.plan.quantized.loading_argument if self.plan.quantized else ""
        lines = [f"base = AutoModelForCausalLM.from_pretrained({_model_argument(model)}{quantized})"]
        if num_added := len(self.manifest.tokenizer.added_by_us):
            comment = f"{num_added:,} token{' was' if num_added == 1 else 's were'} added"
            lines.append(f"base.resize_token_embeddings({self.vocabulary_rows}, mean_resizing=False)  # {comment}")
        lines.append(f"model = PeftModel.from_pretrained(base, {path!r})")
        imports = ["from peft import PeftModel"]
        if quantized:
            imports.append("from transformers import BitsAndBytesConfig")
        return _loading_code("\n".join(lines), config.corpus, *imports)


def _reason_for_tunewell(model: str) -> str | None:
    """Return why only tunewell can load a model, or None if transformers can load it."""
    if is_preset(model):
        return f"`{model}` is created from random weights and has no files"
    if model.startswith(("package:", "ollama:")) or Path(model).suffix in WEIGHT_SUFFIXES:
        return f"`{model}` is not a folder that transformers can load"
    return None


def _model_argument(model: str) -> str:
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return f"{path.parent.as_posix()!r}, gguf_file={path.name!r}"
    return repr(path.as_posix() if model.startswith("~") else model)


def _loading_code(lines: str, corpus: str, *imports: str) -> list[str]:
    tokenizer = (Path(corpus) / "tokenizer").as_posix()
    return [
        _HERE,
        "",
        "```python",
        *imports,
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        *lines.splitlines(),
        f"tokenizer = AutoTokenizer.from_pretrained({tokenizer!r})",
        "```",
    ]


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *[f"- {line}" for line in lines], ""] if lines else []


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
