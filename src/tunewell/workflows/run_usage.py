"""How a run's checkpoint is used, and how the run is repeated: words for its page, all of which hold in its folder."""

from dataclasses import dataclass
from pathlib import Path

from tunewell.config.load import load_config
from tunewell.core.model_files import WEIGHT_SUFFIXES
from tunewell.models.presets import is_preset
from tunewell.records.manifest import Manifest
from tunewell.records.rundir import RUN_CONFIG

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

    is_lora: bool
    num_rows: int
    """Of the embedding, tokens that were added included."""
    allow_pickle: bool

    def use(self, run: Path, checkpoint: Path, manifest: Manifest) -> list[str]:
        """Say how to load a checkpoint; code where other programs can, commands of ours where they cannot."""
        config = load_config(run / RUN_CONFIG).config
        model, path = config.model or "", checkpoint.as_posix()
        if not self.is_lora:
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
