"""`tunewell.doctor`: check the environment from a notebook, with few imports: the kernel's packages may be broken."""

from tunewell.core.progress import ProgressListener, silent
from tunewell.features.doctor.findings import EnvironmentReport
from tunewell.features.doctor.workflow import doctor as run_doctor


def doctor(
    *, model: str | None = None, python: str | None = None, progress: ProgressListener | bool = False
) -> EnvironmentReport:
    """Check the environment: packages, versions, driver, disks and model files.

    In a notebook, it also finds packages that the kernel imported before they were replaced, which the command cannot.
    `findings` of the result lists what is wrong, each with its fix; `fix_script()` returns all fixes as one script.
    `progress` is a function that receives each stage.
    """
    listen = progress if callable(progress) else silent
    return run_doctor(model=model, python=python, is_kernel=True, progress=listen)
