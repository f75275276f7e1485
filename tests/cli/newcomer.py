"""A newcomer at a terminal: runs commands on a pseudo-terminal and answers each question with Enter or a given word."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?!\n)")
_PROMPT = re.compile(r"number \[1 = [^\n]*\]: $")
_SECONDS = 300.0


@dataclass
class Newcomer:
    """A person in a folder. `answers` maps a part of a question to what is typed; other questions get Enter."""

    folder: Path
    answers: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    screens: list[str] = field(default_factory=list)

    def run(self, *arguments: str) -> int:
        """Run `tunewell` with these arguments, answer its questions, and return its exit code."""
        self.commands.append(" ".join(arguments))
        master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}
        environment.pop("CI", None)
        command = [sys.executable, "-m", "tunewell", *arguments]
        process = subprocess.Popen(
            command, cwd=self.folder, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        try:
            self.screens.append(self._converse(master, time.monotonic() + _SECONDS))
            return process.wait(timeout=_SECONDS)
        finally:
            process.kill()
            os.close(master)

    def _converse(self, master: int, deadline: float) -> str:
        raw, answered = b"", 0
        while time.monotonic() < deadline:
            ready, _, _ = select.select([master], [], [], 1.0)
            if not ready:
                continue
            try:
                data = os.read(master, 65_536)
            except OSError:  # Linux reports the end of a pseudo-terminal like this
                break
            if not data:
                break
            raw += data
            text = _ANSI.sub("", raw.decode("utf-8", "replace")).replace("\r\n", "\n")
            if _PROMPT.search(text) and len(raw) > answered:
                answered = len(raw) + 8  # the terminal echoes the answer
                question = text[:-1].rpartition("\n\n")[2]
                self.questions.append(question)
                word = next((word for part, word in self.answers.items() if part in question), "")
                os.write(master, f"{word}\n".encode())
        return _ANSI.sub("", raw.decode("utf-8", "replace")).replace("\r\n", "\n")

    @property
    def next_command(self) -> list[str]:
        """The first command that the last screen names after `next:`."""
        named = " ".join(self.screens[-1].rpartition("next: ")[2].split())
        return re.findall(r"`tunewell ([^`]+)`", named)[0].split()
