"""`tunewell launch`: write the job file of a cluster."""

from typing import TYPE_CHECKING, Annotated

from tunewell.cli.options import Argument, AsJson, ConfigFile
from tunewell.cli.render import emit, folded_table, hanging, json_text
from tunewell.core.errors import UserError
from tunewell.features.launch.options import SlurmOptions

if TYPE_CHECKING:
    from tunewell.features.launch.workflow import SlurmResult


def command(
    scheduler: Annotated[str, Argument("The scheduler of the cluster: `slurm`.", "SCHEDULER")],
    *,
    options: SlurmOptions,
    config: ConfigFile = None,
    json: AsJson = False,
) -> None:
    """Write a job file that trains a config on several machines, and resumes it."""
    from tunewell.features.launch.workflow import launch_slurm

    if scheduler != "slurm":
        raise UserError(f"`{scheduler}` is not known", fix="use `tunewell launch slurm`")
    result = launch_slurm(config, options)
    emit(json_text(result.as_json()) if json else screen(result, options))


def screen(result: "SlurmResult", options: SlurmOptions) -> str:
    """Return the screen: the job, what was checked, and how to submit it."""
    devices = f"{options.gpus} GPUs each" if options.gpus else "CPUs"
    rows = [
        ["config", f"`{result.config}`"],
        ["job", f"{options.nodes} x {devices}: {result.ranks} processes, {options.time}"],
        ["stops", f"a checkpoint {options.warning} s before the limit or at preemption; then the job is requeued"],
        ["checked", "`sbatch --test-only` accepts it" if result.is_checked else "not by Slurm"],
    ]
    notes = [hanging("note: ", note) for note in result.notes]
    return "\n".join([folded_table(rows), *notes, f"wrote `{result.path}`", f"next: sbatch {result.path}"])
