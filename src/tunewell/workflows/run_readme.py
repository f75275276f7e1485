"""The page in a run's folder: what was trained, on what, why with these numbers, how to use it and how to repeat it."""

from pathlib import Path
from typing import Any

from tunewell.core.files import write_atomic
from tunewell.core.redact import redact
from tunewell.core.units import count, duration
from tunewell.records.events import as_number
from tunewell.records.manifest import Manifest
from tunewell.records.plan import Chosen, Plan
from tunewell.workflows.run_usage import Usage


def run_readme(
    folder: Path, *, plan: Plan, manifest: Manifest, result: dict[str, Any], healed: list[str], usage: Usage
) -> None:
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
        *_use(folder, usage, manifest, result),
        "",
        "## Why these numbers",
        "",
        "| | value | because |",
        "|---|---|---|",
        *[f"| {name.replace('_', ' ')} | {value.value} | {value.because} |" for name, value in _choices(plan)],
        "",
        "## Repeat it",
        "",
        *usage.repeat(),
        "",
        *_listed("What was healed", healed),
        *_listed("What to change next time", result["advice"]),
        *_listed("What was said on the way", result["notes"]),
    ]
    write_atomic(folder / "README.md", redact("\n".join(lines)))


def _listed(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *[f"- {line}" for line in lines], ""] if lines else []


def _use(folder: Path, usage: Usage, manifest: Manifest, result: dict[str, Any]) -> list[str]:
    paths = [Path(path) for path in result["artefacts"] if "checkpoints" in path]
    if not paths:
        return ["No checkpoint was written."]
    return usage.use(folder, paths[0].relative_to(folder), manifest)


def _choices(plan: Plan) -> list[tuple[str, Chosen[Any]]]:
    fields = [(name, getattr(plan, name)) for name in type(plan).model_fields]
    return [(name, value) for name, value in fields if isinstance(value, Chosen)]


def _number(value: float | str | None) -> str:
    return "-" if value is None else f"{as_number(value):.4f}"
