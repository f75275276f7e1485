"""The page in a run's folder: what was trained, on what, why with these numbers, how to use it and how to repeat it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.config.load import load_config
from tunewell.core.files import write_atomic
from tunewell.core.model_files import WEIGHT_SUFFIXES
from tunewell.core.presets import is_preset
from tunewell.core.redact import redact
from tunewell.core.units import count, duration
from tunewell.records.events import as_number
from tunewell.records.manifest import Manifest
from tunewell.records.plan import Chosen, Plan
from tunewell.records.rundir import RUN_CONFIG

# How a run's checkpoint is used, and how the run is repeated: words for its page, all of which hold in its folder.

_HERE = "In this folder:"
_BY_US = """{why}, so only tunewell can put the adapter on it. In this folder:

```
tunewell chat .{flag}
tunewell export . --to merged{flag}
```

The second writes a whole model that transformers loads from `export/merged`."""


@dataclass(frozen=True)
class Usage:
    """What a page about a run has to know to be of use."""

    is_adapter: bool
    num_rows: int
    """Of the embedding, tokens that were added included."""
    allow_pickle: bool

    def use(self, run: Path, checkpoint: Path, manifest: Manifest) -> list[str]:
        """Say how to load a checkpoint; code where other programs can, commands of ours where they cannot."""
        config = load_config(run / RUN_CONFIG).config
        model, path = config.model or "", checkpoint.as_posix()
        if not self.is_adapter:
            return _code(f"model = AutoModelForCausalLM.from_pretrained({path!r})", config.corpus)
        if why := _only_ours(model):
            return _BY_US.format(why=why, flag=self._flag).splitlines()
        lines = [f"base = AutoModelForCausalLM.from_pretrained({_place(model)})"]
        if added := len(manifest.tokenizer.added_by_us):
            words = f"{added:,} token{' was' if added == 1 else 's were'} added"
            lines.append(f"base.resize_token_embeddings({self.num_rows}, mean_resizing=False)  # {words}")
        lines.append(f"model = PeftModel.from_pretrained(base, {path!r})")
        return _code("\n".join(lines), config.corpus, "from peft import PeftModel")

    def repeat(self) -> list[str]:
        """Give the command that trains the same again, beside this run."""
        return [_HERE, "", "```", f"tunewell train --config config.yaml --out ../another-run{self._flag}", "```"]

    @property
    def _flag(self) -> str:
        return " --allow-pickle" if self.allow_pickle else ""


def _only_ours(model: str) -> str | None:
    """Say why no other program can load a model; None where transformers can."""
    if is_preset(model):
        return f"`{model}` starts from nothing and has no files"
    if model.startswith("package:") or Path(model).suffix in WEIGHT_SUFFIXES:
        return f"`{model}` is not in a folder that transformers reads"
    return None


def _place(model: str) -> str:
    path = Path(model).expanduser()
    return (
        f"{path.parent.as_posix()!r}, gguf_file={path.name!r}"
        if path.suffix == ".gguf"
        else repr(path.as_posix() if model.startswith("~") else model)
    )


def _code(lines: str, corpus: str, *imports: str) -> list[str]:
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
        "![loss](loss.svg)",
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
