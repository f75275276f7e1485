"""Start the processes that send the metrics of a run to its trackers."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import tunewell
from tunewell.config.extensions import TRACKERS
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.files import open_file


def require_trackers(names: Sequence[str], python: str | None) -> None:
    """Raise UserError if the package of a tracker is missing in this environment, or `python` does not exist."""
    if python is not None:
        if names and not Path(python).expanduser().is_file():
            raise UserError(
                f"there is no Python `{python}`",
                where="`track_python` or `--python`",
                fix="name the Python of an environment, like `~/trackers/bin/python`",
            )
        return
    for name in names:
        module, package = TRACKERS.entry(name).module, TRACKERS.entry(name).package
        if module and importlib.util.find_spec(module) is None:
            raise UserError(
                f"the tracker `{name}` needs the package `{package}`",
                fix=f"`pip install {package}`, or name a Python that has it with `track_python` or `--python`",
            )


def start_trackers(run: Path, config: Config | None, note: Callable[[str], None]) -> None:
    """Start one process for each tracker of a config, which follows the run and outlives it. None: not on this rank."""
    for name in config.track if config else ():
        try:
            _start(run, name, config.track_python if config else None)
        except OSError as error:
            later = f"`tunewell track {run} --to {name}` sends the run later"
            note(f"the tracker `{name}` was not started ({error}); {later}")


def send_run(run: Path, name: str, python: str | None) -> tuple[int, str]:
    """Send a run to a tracker now. Return the exit code and the end of its messages."""
    process = _start(run, name, python, is_waiting=True)
    _, errors = process.communicate()
    return process.returncode, errors.decode("utf-8", "replace").strip()[-2000:]


def _start(run: Path, name: str, python: str | None, *, is_waiting: bool = False) -> "subprocess.Popen[bytes]":
    command = [str(Path(python).expanduser()) if python else sys.executable, "-m"]
    command += ["tunewell.features.track.follow", str(run.absolute()), name, TRACKERS.entry(name).path]
    environment = dict(os.environ)
    if python:
        # The other environment may not have tunewell. A folder with a link to it has nothing else of this environment.
        environment["PYTHONPATH"] = str(_folder_with_tunewell())
    if is_waiting:
        command.append("--once")
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    (run / "track").mkdir(parents=True, exist_ok=True)
    with open_file(run / "track" / f"{name}.log", "ab") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C and the end of the terminal are for the run
        )


def _folder_with_tunewell() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tunewell-track-"))
    (folder / "tunewell").symlink_to(Path(tunewell.__file__).parent.resolve())
    return folder
