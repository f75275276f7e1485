"""The page in a run's folder: what was trained, on what, why with these numbers, how to use it and how to repeat it."""

from pathlib import Path
from typing import Any

from tunewell.core.files import write_atomic
from tunewell.core.redact import redact
from tunewell.core.units import count, duration
from tunewell.records.events import as_number
from tunewell.records.manifest import Manifest
from tunewell.records.plan import Chosen, Plan

_USE_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({model!r}), {path!r})
```"""
_USE_ADAPTER_ON_GGUF = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("the folder of the .gguf file", gguf_file="its name")
model = PeftModel.from_pretrained(base, {path!r})
```"""
_USE_MODEL = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({path!r})
```"""


def run_readme(folder: Path, *, plan: Plan, manifest: Manifest, result: dict[str, Any], healed: list[str]) -> None:
    """Write `README.md` into a run's folder."""
    held_out = result["held_out"]
    lines = [
        f"# A run of {plan.made_by}",
        "",
        f"`{plan.model}` was trained by {plan.method.value} on {count(manifest.documents, 'document')} "
        f"(corpus {manifest.corpus_sha256[:16]}); it {result['status']}: {result['reason']}.",
        "",
        "| | first | last |",
        "|---|---|---|",
        f"| loss | {_number(result['first_loss'])} | {_number(result['last_loss'])} |",
        f"| held-out loss | {_number(held_out['first'])} | {_number(held_out['last'])} |",
        "",
        f"{count(result['steps'], 'step')}, {count(result['tokens'])} tokens, {duration(result['seconds'])}, "
        f"{result['tokens_per_second']:,.0f} tokens/s while training.",
        "",
        "![loss](loss.png)",
        "",
        "## What lies here",
        "",
        *[
            f"- `{Path(path).relative_to(folder) if Path(path).is_relative_to(folder) else path}`: {what}"
            for path, what in result["artefacts"].items()
        ],
        "- `samples.jsonl`: answers to held-out questions, at every look",
        "- `plan.json`, `config.yaml`: what was decided and what was asked for",
        "",
        "## Use it",
        "",
        *_use(folder, plan, result),
        "",
        "## Why these numbers",
        "",
        "| | value | because |",
        "|---|---|---|",
        *[f"| {name.replace('_', ' ')} | {value.value} | {value.because} |" for name, value in _choices(plan)],
        "",
        "## Repeat it",
        "",
        "```",
        f"tunewell train --config {folder / 'config.yaml'} --out another-run",
        "```",
        "",
        *_listed("What was healed", healed),
        *_listed("What to change next time", result["advice"]),
        *_listed("What was said on the way", result["notes"]),
    ]
    write_atomic(folder / "README.md", redact("\n".join(lines)))


def _listed(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *[f"- {line}" for line in lines], ""] if lines else []


def _use(folder: Path, plan: Plan, result: dict[str, Any]) -> list[str]:
    paths = [path for path, _ in result["artefacts"].items() if "checkpoints" in path]
    if not paths:
        return ["No checkpoint was written."]
    is_gguf = plan.model.startswith("package:") or plan.model.endswith(".gguf")
    text = _USE_MODEL if plan.method.value == "full" else _USE_ADAPTER_ON_GGUF if is_gguf else _USE_ADAPTER
    return text.format(model=plan.model, path=paths[0]).splitlines()


def _choices(plan: Plan) -> list[tuple[str, Chosen[Any]]]:
    fields = [(name, getattr(plan, name)) for name in type(plan).model_fields]
    return [(name, value) for name, value in fields if isinstance(value, Chosen)]


def _number(value: float | str | None) -> str:
    return "-" if value is None else f"{as_number(value):.4f}"
