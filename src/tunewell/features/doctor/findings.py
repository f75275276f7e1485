"""Findings: what is wrong with an environment, why it matters, and the commands that fix it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from tunewell.features.doctor.facts import Python
from tunewell.machine.shield import Level

LEVELS: tuple[Level, ...] = ("broken", "warning", "note")
TRAINING = frozenset({"torch", "transformers", "safetensors", "tokenizers", "numpy", "pyarrow", "accelerate", "gguf"})
"""Packages that `tunewell train` imports."""
EXIT_CODES: Mapping[Level, int] = {"broken": 4, "warning": 3, "note": 0}


@dataclass(frozen=True)
class EnvironmentProblem:
    """One problem. `commands` mend it; an empty list means that a person must act, as `fix` says."""

    id: str
    level: Level
    what: str
    why: str
    fix: str
    commands: Sequence[str] = ()
    packages: frozenset[str] = frozenset()
    """Packages that this explains: their failed imports are its evidence, not findings of their own."""
    evidence: Sequence[str] = ()
    """What was seen, and the issues or documents that describe it."""
    group: str = ""
    """Filled in by the registry."""

    def as_json(self) -> dict[str, Any]:
        """Return the finding for `--json`."""
        return {name: value for name, value in asdict(self).items() if name != "packages"}


@dataclass(frozen=True)
class EnvironmentReport:
    """The findings of one environment, root causes first, and the facts that are shown with them."""

    findings: Sequence[EnvironmentProblem]
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    num_checks: int = 0
    python: str = ""
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 3 for warnings, 4 if something is broken."""
        return max((EXIT_CODES[finding.level] for finding in self.findings), default=0)

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis for `--json`."""
        return {
            "status": {0: "sound", 3: "warnings", 4: "broken"}[self.exit_code],
            "exit_code": self.exit_code,
            "python": self.python,
            "facts": dict(self.facts),
            "num_checks": self.num_checks,
            "findings": [finding.as_json() for finding in self.findings],
            "seconds": round(self.seconds, 3),
        }

    def __repr__(self) -> str:
        return f"EnvironmentReport(exit_code={self.exit_code}, findings={[finding.id for finding in self.findings]})"

    def _repr_html_(self) -> str:
        found = [(f"{one.level}: {one.id}", f"{one.what}. {one.fix}") for one in self.findings]
        rows = [*self.facts.items(), *(found or [("result", "nothing is wrong")])]
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
        return f"<table style='text-align:left'>{cells}</table>"

    def fix_script(self) -> str:
        """Return one shell script with every command, in order. Nothing is run."""
        lines = ["#!/bin/sh", "# From `tunewell doctor --fix`. Read it before you run it.", "set -e"]
        done: set[str] = set()
        for finding in self.findings:
            if finding.level == "note":
                continue
            lines += ["", f"# {finding.id}: {finding.what}"]
            if not finding.commands:
                lines.append(f"# by hand: {finding.fix}")
            lines += [command for command in finding.commands if command not in done]
            done.update(finding.commands)
        if not any(finding.level != "note" for finding in self.findings):
            lines += ["", "# nothing to fix"]
        return "\n".join(lines)


def pip_install(python: Python, *arguments: str) -> str:
    """Return the command that installs into this interpreter; an environment of uv has no pip."""
    quoted = " ".join(argument if argument.startswith("-") else _quote(argument) for argument in arguments)
    return f"{_pip(python, 'install')} {quoted}"


def pip_uninstall(python: Python, name: str) -> str:
    """Return the command that removes a package."""
    return f"{_pip(python, 'uninstall')} {'--yes ' if python.has_pip else ''}{name}"


def _pip(python: Python, action: str) -> str:
    executable = shlex.quote(python.executable)
    return f"{executable} -m pip {action}" if python.has_pip else f"uv pip {action} --python {executable}"


def _quote(text: str) -> str:
    return f'"{text}"' if any(sign in text for sign in "<>=!~[ ") else shlex.quote(text)
