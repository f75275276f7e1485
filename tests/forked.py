"""Commands in forked children of the test process: real processes, without seconds of imports for each."""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def in_child(act: Callable[[], None]) -> int:
    """Run something in a forked child; give its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(_fork(act), 0)[1])


class Command:
    """`tunewell ARGUMENTS` in a child; what it prints goes to files, and `wait` gives it.

    A training goes without its supervisor, which would start it in a process of its own.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        env: dict[str, str] | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        """Start a command; `before` is called in the child first."""
        self._out, self._err = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))  # noqa: SIM115  kept open
        arguments = (*arguments, "--no-supervisor") if arguments[0] == "train" else arguments
        self.arguments = arguments
        # Once, in this process: each child would import them again.
        for package in ("cli.commands", "workflows"):
            with suppress(ModuleNotFoundError):
                importlib.import_module(f"tunewell.{package}.{arguments[0]}")

        def act() -> None:
            os.chdir(cwd)
            os.environ.update({"CI": "1", **(env or {})})
            if before:
                before()
            _run(arguments, self._out.fileno(), self._err.fileno())

        self.pid = _fork(act)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 180) -> "subprocess.CompletedProcess[str]":
        """Wait for its end; kill it where that does not come in time."""
        deadline = time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"tunewell {' '.join(self.arguments)}\n{self._told(self._err)}")
            time.sleep(0.01)
        code = os.waitstatus_to_exitcode(status)
        return subprocess.CompletedProcess(self.arguments, code, self._told(self._out), self._told(self._err))

    @staticmethod
    def _told(file: "tempfile._TemporaryFileWrapper[str]") -> str:
        file.seek(0)
        return file.read()


class PipedCommand:
    """`tunewell ARGUMENTS` in a child, with its stdout in a pipe that the test reads while the command runs."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        reading, writing = os.pipe()

        def act() -> None:
            os.environ.update(env or {})
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _run(arguments, writing, 2)

        self.pid = _fork(act)
        os.close(writing)
        self.stdout = os.fdopen(reading, encoding="utf-8")

    def wait(self, timeout: float = 30) -> int:
        """Return the exit code; raise TimeoutError if the command runs on."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        raise TimeoutError("the command did not end")

    def kill(self) -> None:
        """End the command if it still runs."""
        self.stdout.close()
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def run_command(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return Command(*arguments, cwd=cwd, env=env).wait()


def run_and_exit(arguments: tuple[str, ...]) -> None:
    """Run a command in a child that was forked already, on its file descriptors 0 to 2, and exit with its code."""
    code = 1
    try:
        _use_one_thread()
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        _run(arguments, 1, 2)
    finally:
        os._exit(code)


def _run(arguments: tuple[str, ...], out: int, err: int) -> None:
    from tunewell.cli import main as frame

    for number, name in ((out, "stdout"), (err, "stderr")):
        os.dup2(number, 1 if name == "stdout" else 2)
        setattr(sys, name, open(1 if name == "stdout" else 2, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    code = frame.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _use_one_thread() -> None:
    """OpenMP's threads do not live on in a forked child: whoever computes with several would wait for ever."""
    if "torch" in sys.modules:
        from tunewell.machine import device as threads

        sys.modules["torch"].set_num_threads(1)
        threads.usable_cores = lambda: 1  # so that nobody measures more


def _fork(act: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _use_one_thread()
            act()
            code = 0
        finally:
            os._exit(code)
    return child
