"""`tunewell launch slurm`: write a job file that trains a config on several machines, and have Slurm check it."""

import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.core.child import run
from tunewell.core.errors import UserError
from tunewell.core.files import read_text, write_atomic
from tunewell.core.units import count
from tunewell.features.launch.options import SlurmOptions
from tunewell.runs.config import has_begun, require_inputs

_SBATCH_SECONDS = 60.0
_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")
_NAME_OF_SLURM = re.compile(r"[\w.,:=-]+")
"""Names of partitions, accounts and constraints: nothing that a shell or a directive reads otherwise."""


@dataclass(frozen=True)
class SlurmResult:
    """The written job file, and what Slurm says of it."""

    path: Path
    config: str
    run: str
    ranks: int
    is_checked: bool = False
    """Whether `sbatch --test-only` accepted the file."""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `launch slurm --json` prints."""
        return {**self.__dict__, "path": str(self.path), "format_version": 1}


def launch_slurm(config: Path | None, options: SlurmOptions) -> SlurmResult:
    """Write the job file. Raise UserError for what would stop the job; its inputs are checked as by `train`."""
    loaded = load_config(config)
    require_inputs(loaded, is_resuming=has_begun(loaded))
    _require_plain(options)
    if options.out.exists() and not options.force:
        raise UserError(f"`{options.out}` exists", fix="overwrite it with `--force`, or choose another with `--out`")
    if loaded.base.resolve() != options.out.absolute().parent.resolve():
        raise UserError(
            f"the config is in `{loaded.base}`, the job file would be in another folder",
            fix="run `tunewell launch slurm` in the folder of the config, which is where the job starts",
        )
    write_atomic(options.out, slurm_file(loaded, options))
    result = SlurmResult(
        options.out, _config_name(loaded), loaded.config.run, options.num_ranks, notes=_notes(loaded, options)
    )
    return _checked_by_slurm(result)


def slurm_file(loaded: LoadedConfig, options: SlurmOptions) -> str:
    """Return the text of the job file."""
    directives = {
        "job-name": loaded.path(loaded.config.run).name,
        "nodes": options.nodes,
        "ntasks-per-node": max(1, options.gpus),
        "gpus-per-node": options.gpus or None,
        "cpus-per-task": options.cpus,
        "mem": options.memory,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
    }
    values = {
        "config": _config_name(loaded),
        "name": options.out.name,
        "machines": count(options.nodes, "machine"),
        "devices": f"{count(options.gpus, 'GPU')} each" if options.gpus else "on their CPUs",
        "directives": "\n".join(f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None),
        "warning": str(options.warning),
        "requeues": str(options.requeues),
        "python": shlex.quote(sys.executable),
        "given": shlex.join(["--config", _config_name(loaded), *([] if options.gpus else ["--device", "cpu"])]),
    }
    template = read_text(Path(__file__).with_name("slurm.sbatch"))
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def _config_name(loaded: LoadedConfig) -> str:
    return loaded.file.name if loaded.file else FILE_NAME


def _require_plain(options: SlurmOptions) -> None:
    """Raise UserError for values that Slurm would refuse, or that would add lines to the job file."""
    if not _TIME.fullmatch(options.time):
        raise UserError(f"`--time {options.time}` is no time of Slurm", fix="write `HH:MM:SS` or `D-HH:MM:SS`")
    for name in ("partition", "account", "memory"):
        value = getattr(options, name)
        if value is not None and not _NAME_OF_SLURM.fullmatch(value):
            raise UserError(f"`--{name} {value}` is not a name", fix="use letters, digits, `.`, `_` and `-`")


def _notes(loaded: LoadedConfig, options: SlurmOptions) -> list[str]:
    """Return what the user should know before submitting."""
    notes = ["the folder must be on a disk that all machines share, and so must this Python environment"]
    tokens = loaded.config.train.batch_tokens
    if options.num_ranks > 1:
        size = f"{count(tokens)} tokens" if isinstance(tokens, int) else "`train.batch_tokens` tokens"
        notes.append(
            f"the {count(options.num_ranks, 'process', 'processes')} share the micro-batches of a step of {size}: with "
            "fewer micro-batches than processes, some are idle. The result does not depend on their number"
        )
    return notes


def _checked_by_slurm(result: SlurmResult) -> SlurmResult:
    """Return the result with Slurm's own check. Raise UserError if Slurm refuses the file."""
    if shutil.which("sbatch") is None:
        note = "`sbatch` is not on this machine: check the file on the cluster with `sbatch --test-only`"
        return replace(result, notes=[*result.notes, note])
    try:
        ended = run(["sbatch", "--test-only", str(result.path)], seconds=_SBATCH_SECONDS)
    except (TimeoutError, OSError) as error:
        return replace(result, notes=[*result.notes, f"`sbatch --test-only` did not answer: {error}"])
    said = [line for line in ended.err.splitlines() if line.strip()]
    if ended.code != 0:
        raise UserError(
            f"Slurm refuses `{result.path}`",
            where="; ".join(line.removeprefix("sbatch: error: ") for line in said) or None,
            fix=f"change the options, or the file; then `sbatch --test-only {result.path}`",
        )
    return replace(result, is_checked=True)
