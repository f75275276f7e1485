"""Command-line options that several commands share, and the parameters that typer reads."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from tunewell.core.options import Argument, Option

if TYPE_CHECKING:
    from tunewell.config.load import LoadedConfig

ConfigFile = Annotated[
    Path | None,
    Option("Config file. Default: `tunewell.yaml` in this folder.", "FILE"),
]
Sets = Annotated[list[str] | None, Option("Set a config key. Can be repeated.", "KEY=VALUE")]
DataPaths = Annotated[list[str] | None, Option("File, folder or glob of rows. Can be repeated.", "PATH")]
TrainedModel = Annotated[str | None, Option("Model to train.", "MODEL")]
TokenizerModel = Annotated[str | None, Option("Model whose tokenizer and chat template are used.", "MODEL")]
RunArgument = Annotated[str | None, Argument("A run, an adapter or a model. Default: this folder's run.", "RUN")]
ModelArgument = Annotated[
    str | None,
    Argument("A run, an adapter, a model folder, a `.gguf` file or a hub id. Default: this folder's run.", "MODEL"),
]
Checkpoint = Annotated[str, Option("Checkpoint of a run: `best`, `last` or a step.", "STEP")]
BaseModel = Annotated[str | None, Option("Base model of an adapter, if it is not recorded.", "MODEL")]
IndexOption = Annotated[str | None, Option("Answer from this index, made by `tunewell index FOLDER`.", "INDEX")]
Device = Annotated[str, Option("Device: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`.", "NAME")]
RunDevice = Annotated[str | None, Option("Device: `cpu`, `cuda`, `cuda:1` or `mps`.", "NAME")]
AllowPickle = Annotated[
    bool, Option("Load `.pt` or `.bin` weights, which can run code. Trusted files only.", is_rare=True)
]
Offline = Annotated[bool, Option("Use earlier downloads of remote rows, and send no requests.", is_last=True)]
AsJson = Annotated[bool, Option("Print JSON.", is_last=True)]


@dataclass(frozen=True)
class ConfigOptions:
    """The options of a command that name a config and change it."""

    config: ConfigFile = None
    set_: Sets = None
    offline: Offline = False

    @property
    def sets(self) -> list[str]:
        """The values of `--set`, with `storage.offline` for `--offline`."""
        return [*(self.set_ or ()), *(["storage.offline=true"] if self.offline else [])]

    def load(self, **flags: Any) -> "LoadedConfig":
        """Return the config; `flags` are other options of the command, like `model`."""
        from tunewell.config.load import load_config

        return load_config(self.config, self.sets, **flags)

    def train_command(
        self, *, model: str | None = None, data: Sequence[str] | None = None, sets: Sequence[str] = ()
    ) -> str:
        """Return the `tunewell train` command with the same options as this command."""
        given = {
            "--config": [self.config],
            "--model": [model],
            "--data": data or (),
            "--set": [*(self.set_ or ()), *sets],
        }
        options = [str(part) for name, values in given.items() for value in values if value for part in (name, value)]
        return shlex.join(["tunewell", "train", *options, *(["--offline"] if self.offline else [])])


def typer_function(command: Callable[..., int | None], *, hides_rare: bool = False) -> Callable[..., int | None]:
    """Return a command as typer reads it: its options as typer's, and the fields of a dataclass as single options."""
    groups: dict[str, Any] = {name: hint for name, hint in _hints(command).items() if is_dataclass(hint)}

    def run(**values: Any) -> int | None:
        for name, group in groups.items():
            given = {option: values.pop(option) for option, _, _ in _declared(group)}
            values[name] = group(**given)
        return command(**values)

    declared = [
        Parameter(
            name, Parameter.KEYWORD_ONLY, default=default, annotation=_for_typer(name, hint, hides_rare=hides_rare)
        )
        for name, hint, default in sorted(_declared(command), key=_is_last)
    ]
    run.__doc__ = command.__doc__
    run.__annotations__ = {one.name: one.annotation for one in declared}
    run.__signature__ = Signature(declared)  # type: ignore[attr-defined]
    return run


def _is_last(declared: tuple[str, Any, Any]) -> bool:
    return any(isinstance(part, Option) and part.is_last for part in get_args(declared[1]))


def _hints(command: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(command, include_extras=True)


def _declared(command: Callable[..., Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the type and the default of each option. A flag without a default is not set."""
    hints = _hints(command)
    for name, parameter in signature(command).parameters.items():
        hint = hints[name]
        is_option = any(isinstance(part, Option) for part in get_args(hint))
        if is_dataclass(hint):
            yield from _declared(hint)  # type: ignore[arg-type]
        elif is_option or not is_dataclass(command):
            is_flag = parameter.default is Parameter.empty and bool in get_args(hint)
            yield name, hint, False if is_flag else parameter.default


def num_rare(command: Callable[..., int | None]) -> int:
    """Return the number of options that only `--help --all` shows."""
    hints = (get_args(hint) for _, hint, _ in _declared(command))
    return sum(isinstance(part, Option) and part.is_rare for parts in hints for part in parts)


def _for_typer(name: str, hint: Any, hides_rare: bool) -> Any:
    kind, *parts = get_args(hint) or (hint,)
    option = next((part for part in parts if isinstance(part, Option)), None)
    if option is None:
        return hint
    import typer

    shown = {"help": option.help, "metavar": option.metavar, "hidden": option.hidden or (hides_rare and option.is_rare)}
    if isinstance(option, Argument):
        return Annotated[kind, typer.Argument(show_default=False, **shown)]
    flags = option.flags or (f"--{name.rstrip('_').replace('_', '-')}",)
    return Annotated[option.kind or kind, typer.Option(*flags, min=option.min, max=option.max, **shown)]
