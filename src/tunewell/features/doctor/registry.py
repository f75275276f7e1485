"""All checks, in the order in which causes precede their effects, and `diagnose`, which runs them."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tunewell.features.doctor.checks import gpu, machine, models, packages, versions
from tunewell.features.doctor.facts import Environment
from tunewell.features.doctor.findings import LEVELS, EnvironmentProblem

DoctorCheck = tuple[str, Callable[[Environment], Iterable[EnvironmentProblem]]]
"""The group of a check, and the function that reads the facts."""

CHECKS: Sequence[DoctorCheck] = (
    ("disk and memory", machine.disks),
    ("python", packages.python_version),
    ("python", packages.python_path),
    ("notebook", versions.notebook_kernel),
    ("packages", packages.training_packages),
    ("packages", packages.metadata),
    ("packages", packages.files),
    ("versions", versions.conflicts),
    ("packages", packages.numpy_abi),
    ("packages", packages.requirements),
    ("packages", packages.failed_imports),
    ("gpu", gpu.driver),
    ("gpu", gpu.torch_build),
    ("gpu", gpu.torch_sees_gpu),
    ("gpu", gpu.bitsandbytes_binary),
    ("gpu", gpu.emulated_bf16),
    ("gpu", gpu.busy_gpu),
    ("model", models.model_files),
    ("model", models.hub_access),
    ("model", models.model_size),
    ("disk and memory", machine.memory),
)


def run_checks(facts: Environment) -> list[EnvironmentProblem]:
    """Return the findings, broken ones first, in the order of the checks.

    A failed import of a package that an earlier finding explains is evidence of that finding.
    """
    found: list[EnvironmentProblem] = []
    for group, check in CHECKS:
        for finding in check(facts):
            finding = replace(finding, group=group)
            cause = _cause(finding, found)
            if cause is None:
                found.append(finding)
            else:
                known = found[cause]
                level = "broken" if finding.level == "broken" else known.level
                found[cause] = replace(known, level=level, evidence=[*known.evidence, finding.why])
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _cause(finding: EnvironmentProblem, found: Sequence[EnvironmentProblem]) -> int | None:
    """Return the index of an earlier finding that explains a failed import or an unmet requirement, or None."""
    is_import, is_requirement = finding.id.startswith("import-"), finding.id.startswith("requirement-")
    for index, cause in enumerate(found):
        if cause.level == "note":
            continue
        if is_import and (cause.level == "broken" or cause.id.startswith("requirement-")):
            # The error of another package names the broken one: no metadata was found for `tokenizers`.
            is_named = any(re.search(rf"\b{re.escape(name)}\b", finding.why) for name in cause.packages)
            if finding.packages & cause.packages or (is_named and cause.group == "packages"):
                return index
        if finding.id == "gpu-not-found" and cause.group == "gpu" and cause.level == "broken":
            return index
        if finding.group == "versions" and cause.id == "metadata-double" and finding.packages & cause.packages:
            return index  # which of the two versions is imported is not known
        is_known = cause.group == "versions" or cause.id == "numpy-abi"
        if is_requirement and is_known and finding.what.partition(" ")[0] in cause.packages:
            return index
    return None
