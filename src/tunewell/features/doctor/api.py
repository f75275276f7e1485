"""`tunewell.doctor`: check the environment from a notebook, with few imports: the kernel's packages may be broken."""

from html import escape

from tunewell.core.progress import ProgressListener, silent
from tunewell.features.doctor.findings import EnvironmentReport
from tunewell.features.doctor.workflow import doctor as run_doctor


class Diagnosis(EnvironmentReport):
    """The result of `tunewell.doctor`: the findings, root causes first, and the facts of the environment."""

    def __repr__(self) -> str:
        return f"Diagnosis(exit_code={self.exit_code}, findings={[finding.id for finding in self.findings]})"

    def _repr_html_(self) -> str:
        found = [(f"{one.level}: {one.id}", f"{one.what}. {one.fix}") for one in self.findings]
        rows = [*self.facts.items(), *(found or [("result", "nothing is wrong")])]
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
        return f"<table style='text-align:left'>{cells}</table>"


def doctor(
    *, model: str | None = None, python: str | None = None, progress: ProgressListener | bool = False
) -> Diagnosis:
    """Check the environment: packages, versions, driver, disks and model files.

    In a notebook, it also finds packages that the kernel imported before they were replaced, which the command cannot.
    `findings` of the result lists what is wrong, each with its fix; `fix_script()` returns all fixes as one script.
    `progress` is a function that receives each stage.
    """
    listen = progress if callable(progress) else silent
    found = run_doctor(model=model, python=python, is_kernel=True, progress=listen)
    return Diagnosis(**{name: getattr(found, name) for name in found.__dataclass_fields__})
