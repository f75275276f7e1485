"""The options of `tunewell launch slurm`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tunewell.core.options import Option


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The job: machines, GPUs and limits."""

    nodes: Annotated[int, Option("Machines.", "N", min=1)] = 1
    gpus: Annotated[int, Option("GPUs of each machine; 0: train on its CPUs.", "M", min=0)] = 1
    cpus: Annotated[int, Option("CPU cores of each process. One process runs per GPU.", "N", min=1)] = 8
    memory: Annotated[str | None, Option("Memory of each machine, such as `200G`. Default: Slurm's.", "SIZE")] = None
    time: Annotated[str, Option("Time limit: `HH:MM:SS` or `D-HH:MM:SS`. Then the job is requeued.", "TIME")] = (
        "24:00:00"
    )
    partition: Annotated[str | None, Option("Partition of the cluster.", "NAME")] = None
    account: Annotated[str | None, Option("Account that is charged.", "NAME")] = None
    requeues: Annotated[int, Option("How often the job may start again.", "N", min=0, is_rare=True)] = 20
    warning: Annotated[
        int, Option("Seconds before the limit at which a checkpoint is saved.", "SECONDS", min=60, is_rare=True)
    ] = 300
    out: Annotated[Path, Option("File to write.", "FILE")] = Path("train.sbatch")
    force: Annotated[bool, Option("Overwrite an existing file.")] = False

    @property
    def num_ranks(self) -> int:
        """The processes of the job, one per GPU."""
        return self.nodes * max(1, self.gpus)
