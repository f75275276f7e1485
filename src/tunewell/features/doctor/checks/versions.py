"""The version shield and the packages that a notebook kernel still holds in an older version."""

from collections.abc import Iterator

from tunewell.features.doctor.facts import Environment
from tunewell.features.doctor.findings import EnvironmentProblem, pip_install
from tunewell.machine.shield import matching_conflicts, read_shield


def conflicts(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find combinations of versions that are known not to work."""
    for entry in matching_conflicts(facts.versions, read_shield()):
        names = [requirement.partition("<")[0].partition(">")[0].partition("=")[0] for requirement in entry.when]
        installed = " with ".join(f"{name} {facts.versions[name]}" for name in names)
        mend = " ".join(f"`{requirement}`" for requirement in entry.install)
        yield EnvironmentProblem(
            entry.id,
            entry.level,
            f"{installed}: {entry.what}",
            entry.why,
            f"install {mend}" + (f"; {entry.note}" if entry.note else ""),
            [pip_install(facts.python, *entry.install)],
            frozenset(names),
            entry.evidence,
        )


def notebook_kernel(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find packages that were replaced after this notebook's kernel had imported them."""
    if facts.held_by_kernel:
        listed = ", ".join(f"{name} {held}, installed {now}" for name, held, now in facts.held_by_kernel[:4])
        yield EnvironmentProblem(
            "notebook-kernel-stale",
            "broken",
            f"this notebook's kernel still holds older packages: {listed}",
            "it imported them before pip replaced them: old code in memory reads new files",
            "restart the kernel: Runtime > Restart session in Colab, Kernel > Restart in Jupyter",
            packages=frozenset(name for name, _, _ in facts.held_by_kernel),
            evidence=["googlecolab/colabtools#5197", "AI4Finance-Foundation/FinGPT#165"],
        )
