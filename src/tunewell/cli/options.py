"""Command-line options that several commands share."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Config file. Default: `tunewell.yaml` in this folder."),
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a config key. Can be repeated.")
]
DataPaths = Annotated[
    list[str] | None, typer.Option("--data", metavar="PATH", help="File, folder or glob of rows. Can be repeated.")
]
TokenizerModel = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="Model whose tokenizer and chat template are used.")
]
RunArgument = Annotated[
    str | None, typer.Argument(metavar="RUN", help="A run, an adapter or a model. Default: this folder's run.")
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A run, an adapter, a model folder, a `.gguf` file or a hub id. Default: this folder's run.",
    ),
]
Checkpoint = Annotated[
    str, typer.Option("--checkpoint", metavar="STEP", help="Checkpoint of a run: `best`, `last` or a step.")
]
BaseModel = Annotated[
    str | None, typer.Option("--base", metavar="MODEL", help="Base model of an adapter, if it is not recorded.")
]
IndexOption = Annotated[
    str | None, typer.Option("--index", metavar="INDEX", help="Answer from this index, made by `tunewell index`.")
]
Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help="Device: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load `.pt` or `.bin` weights, which can run code. Trusted files only.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Use earlier downloads of remote rows, and send no requests.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def train_command(
    config: Path | None = None,
    *,
    model: str | None = None,
    data: Sequence[str] = (),
    sets: Sequence[str] = (),
    offline: bool = False,
) -> str:
    """Return the `tunewell train` command with the same options as this command."""
    given = {"--config": [config] if config else [], "--model": [model] if model else [], "--data": data, "--set": sets}
    options = [str(part) for name, values in given.items() for value in values for part in (name, value)]
    return shlex.join(["tunewell", "train", *options, *(["--offline"] if offline else [])])


def with_offline(sets: list[str] | None, is_offline: bool) -> list[str]:
    """Return the values of `--set`, with `storage.offline` for `--offline`."""
    return [*(sets or ()), *(["storage.offline=true"] if is_offline else [])]
