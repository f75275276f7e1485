"""Checks of the interpreter and of the installed packages: metadata, files, requirements, imports."""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from tunewell.core.optional import install_arguments
from tunewell.core.units import count
from tunewell.features.doctor.facts import Environment, ImportTrial, Package, public_version
from tunewell.features.doctor.findings import EnvironmentProblem, pip_install, pip_uninstall
from tunewell.features.doctor.packages import STACK, normalize

_OLDEST = "3.11"
_NUMPY = re.compile(r"NumPy 1\.x|numpy\.dtype size changed|multiarray failed to import|_ARRAY_API", re.I)
_NEEDS_EXACT = ("torchvision", "torchaudio", "xformers", "triton")
"""Compiled for one version of torch: with another version they fail or crash."""


def python_version(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find an interpreter that is too old, or that an installed package does not support."""
    python = facts.python
    if python.bits < 64:
        yield EnvironmentProblem(
            "python-32-bit",
            "broken",
            f"Python is a {python.bits}-bit program",
            "torch has no 32-bit wheels",
            "install a 64-bit Python and create a new environment",
        )
    if Version(python.version) < Version(_OLDEST):
        yield EnvironmentProblem(
            "python-too-old",
            "broken" if "tunewell" in facts.versions else "warning",
            f"Python is {python.version}",
            f"tunewell needs Python {_OLDEST} or later",
            f"create an environment with a newer Python: `python{_OLDEST} -m venv .venv`",
        )
    for package in facts.packages:
        if package.name in STACK and package.requires_python and not _allows(package.requires_python, python.version):
            yield EnvironmentProblem(
                "python-not-supported",
                "warning",
                f"{package.name} {package.version} needs Python {package.requires_python}; this is {python.version}",
                "pip would not have installed it: the environment was made for another Python",
                f"install a version of {package.name} for this Python",
                [pip_install(python, "--force-reinstall", package.name)],
                frozenset({package.name}),
            )


def _allows(specifier: str, version: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidSpecifier:
        return True


def python_path(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find variables and files that make Python import other packages than those installed."""
    variables, version = facts.machine.variables, facts.python.markers.get("python_version", "")
    for name in ("PYTHONHOME", "PYTHONPATH"):
        value = variables.get(name, "")
        foreign = [found for found in re.findall(r"python(\d\.\d+)", value) if version and found != version]
        if foreign:
            yield EnvironmentProblem(
                "python-path-foreign",
                "broken",
                f"{name} points to the packages of Python {foreign[0]}; this is Python {version}",
                "compiled packages of another Python cannot be imported, and hide those of this one",
                f"remove {name} from the shell's start files, and open a new shell",
                [f"unset {name}"],
            )
    for name in facts.shadowed:
        yield EnvironmentProblem(
            "package-shadowed",
            "warning",
            f"`{name}` in this folder has the name of a package",
            f"a script in this folder imports it instead of {name.removesuffix('.py')}",
            "rename it",
            [f"mv {shlex.quote(name)} {shlex.quote('my_' + name)}"],
            frozenset({name.removesuffix(".py")}),
        )


def training_packages(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find the packages that training needs and that are not installed. Other commands work without them."""
    if not facts.is_training:
        return
    usable = facts.versions.keys() | facts.damaged
    missing = [name for name in ("torch", "transformers", "safetensors") if name not in usable]
    if missing:
        yield EnvironmentProblem(
            "training-packages",
            "broken",
            f"training needs {', '.join(missing)}: not installed",
            f"installed packages of {facts.python.executable}",
            "install the packages for training",
            [pip_install(facts.python, *install_arguments("train"))],
        )


def metadata(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find packages whose metadata is broken, missing or there twice."""
    usable: dict[tuple[str, str], list[Package]] = defaultdict(list)
    for package in facts.packages:
        if package.problem is None:
            usable[package.name, str(Path(package.folder).parent)].append(package)
        else:
            yield EnvironmentProblem(
                "metadata-broken",
                "broken" if package.name in STACK else "warning",
                f"the metadata of {package.name} {package.version} is broken: {package.problem}",
                "an installation or removal broke off; pip and other packages cannot tell which version is installed",
                "remove the folder and install the package again",
                [f"rm -r {shlex.quote(package.folder)}", _reinstall(facts, package.name, package.version)],
                frozenset({package.name}),
                [package.folder],
            )
    for (name, _), packages in usable.items():
        # Debian writes the metadata of one version in two formats.
        if len({package.version for package in packages}) > 1:
            versions = " and ".join(package.version for package in packages)
            yield EnvironmentProblem(
                "metadata-double",
                "broken" if name in STACK else "warning",
                f"{name} is installed twice in one folder: {versions}",
                "files of both versions are mixed; which version is reported depends on the order of the folder",
                "remove both and install one",
                [
                    *(f"rm -r {shlex.quote(package.folder)}" for package in packages[:-1]),
                    _reinstall(facts, name, packages[-1].version),
                ],
                frozenset({name}),
                [package.folder for package in packages],
            )
    for name, version in facts.without_metadata.items():
        yield EnvironmentProblem(
            "metadata-missing",
            "broken",
            f"{name} {version} has files but no metadata".replace("  ", " "),
            "other packages ask the metadata for its version and fail: PackageNotFoundError",
            "install it again",
            [_reinstall(facts, name, version)],
            frozenset({name}),
        )
    yield from _elsewhere(facts)
    if facts.leftovers:
        names = ", ".join(f"`{Path(path).name}`" for path in facts.leftovers[:4])
        yield EnvironmentProblem(
            "metadata-leftover",
            "warning",
            f"an interrupted pip left {count(len(facts.leftovers), 'folder')} behind: {names}",
            "pip warns about an invalid distribution at every command; the package may be incomplete",
            "remove the folders",
            [f"rm -r {shlex.quote(path)}" for path in facts.leftovers],
        )


def _reinstall(facts: Environment, name: str, version: str) -> str:
    public = public_version(version)
    wanted = f"{name}=={public}" if public else name
    return pip_install(facts.python, "--force-reinstall", "--no-deps", wanted)


def _elsewhere(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find packages of the stack that two folders of `sys.path` hold in different versions."""
    found: dict[str, list[Package]] = defaultdict(list)
    for package in facts.packages:
        if package.problem is None and package.name in STACK:
            found[package.name].append(package)
    for name, packages in found.items():
        first, *others = packages
        hidden = [other for other in others if Path(other.folder).parent != Path(first.folder).parent]
        if any(other.version != first.version for other in hidden):
            yield EnvironmentProblem(
                "package-hidden",
                "warning",
                f"{name} {hidden[0].version} is hidden by {name} {first.version} in another folder",
                "`pip install` may change one while Python imports the other",
                "use one environment: create it without `--system-site-packages`, and unset PYTHONPATH",
                evidence=[package.folder for package in packages],
            )


def files(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find packages of the stack with missing or empty code files."""
    for package in facts.packages:
        if package.missing and package.problem is None:
            yield EnvironmentProblem(
                "files-missing",
                "broken",
                f"{package.name} {package.version} is incomplete: {count(len(package.missing))} of "
                f"{count(package.files, 'file')} are missing or empty",
                "an installation broke off, on a full disk for example, or files were deleted",
                "install it again",
                [_reinstall(facts, package.name, package.version)],
                frozenset({package.name}),
                list(package.missing[:3]),
            )


def requirements(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find unmet requirements of the stack and of its requirements, as `pip check` does for all packages."""
    packages = {package.name: package for package in reversed(facts.packages) if package.problem is None}
    versions, damaged = facts.versions, facts.damaged
    left, seen = [name for name in STACK if name in packages], set(STACK)
    unmet: dict[str, list[tuple[Package, Requirement]]] = defaultdict(list)
    while left:
        package = packages[left.pop()]
        for text in package.requires:
            requirement = _applicable(text, facts)
            if requirement is None:
                continue
            name = normalize(requirement.name)
            if name not in seen and name in packages:
                seen.add(name)
                left.append(name)
            version = versions.get(name)
            is_met = version is not None and requirement.specifier.contains(version, prereleases=True)
            if not is_met and name not in damaged:
                unmet[name].append((package, requirement))
    for name, wanted in unmet.items():
        yield _unmet(facts, name, wanted)


def _applicable(text: str, facts: Environment) -> Requirement | None:
    """Parse a requirement; return None if it does not apply here or belongs to an extra."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    markers = {**facts.python.markers, "extra": ""}
    if requirement.marker is not None and not requirement.marker.evaluate(markers):
        return None
    return requirement


def _unmet(facts: Environment, name: str, wanted: list[tuple[Package, Requirement]]) -> EnvironmentProblem:
    version = facts.versions.get(name)
    dependents = sorted({package.name for package, _ in wanted})
    asks = "; ".join(f"{package.name} {package.version} needs {requirement}" for package, requirement in wanted[:3])
    specifier = SpecifierSet(",".join(sorted({str(requirement.specifier) for _, requirement in wanted} - {""})))
    failed = any((trial := facts.trial(package)) is not None and trial.error for package in dependents)
    if any(package.name in _NEEDS_EXACT for package, _ in wanted) and name == "torch":
        return _compiled_for_other_torch(facts, [package for package, _ in wanted])
    return EnvironmentProblem(
        "requirement-missing" if version is None else "requirement-unmet",
        "broken" if version is None or failed else "warning",
        f"{name} is not installed" if version is None else f"{name} {version} is installed, but {asks}",
        asks if version is None else "the packages were not tested together; imports or calls may fail",
        "install the version that is needed" if version else "install it",
        [pip_install(facts.python, f"{name}{specifier}")],
        frozenset({name, *dependents}),
        [asks],
    )


def _compiled_for_other_torch(facts: Environment, packages: list[Package]) -> EnvironmentProblem:
    torch = facts.versions.get("torch", "none")
    names = sorted({package.name for package in packages})
    listed = " and ".join(f"{package.name} {package.version}" for package in packages)
    return EnvironmentProblem(
        "torch-extension-mismatch",
        "broken",
        f"{listed} was compiled for another torch than {torch}",
        "its operators are not found: `operator torchvision::nms does not exist`; transformers fails with it",
        f"install the {' and '.join(names)} of this torch; or remove it: fine-tuning text does not need it",
        # The index has CUDA builds only, which do not load beside a CPU build of torch.
        [pip_uninstall(facts.python, name) for name in names]
        if torch.endswith("+cpu")
        else [pip_install(facts.python, "--upgrade", *names, f"torch=={public_version(torch)}")],
        frozenset({*names, "transformers", "trl", "peft"}),
        ["huggingface/diffusers#9109", "huggingface/autotrain-advanced#692"],
    )


def numpy_abi(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find packages that were compiled for another NumPy. Those that import them fail in the same way."""
    seen: set[str] = set()
    for trial in facts.imports or ():
        if trial.error is not None and _NUMPY.search(trial.error):
            culprit = normalize(trial.culprit or trial.name)
            name = trial.name if culprit == "numpy" else culprit
            if name not in seen:
                version, numpy = facts.versions.get(name, ""), facts.versions.get("numpy", "?")
                yield EnvironmentProblem(
                    "numpy-abi",
                    "broken",
                    f"{name} {version} was compiled for another NumPy than {numpy}".replace("  ", " "),
                    f"importing {trial.name} fails, or works without NumPy",
                    f"install a newer {name}; or, if a script needs this {name}, an older NumPy: "
                    '`pip install "numpy<2"`',
                    [pip_install(facts.python, "--upgrade", name)],
                    frozenset({name, trial.name, "numpy"}),
                    [trial.error, "NVIDIA/dgx-spark-playbooks#13", "jimmc414/onefilellm#26"],
                )
            seen.add(name)


def failed_imports(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find packages that cannot be imported. Requirements are tried first, so the first failure is the cause."""
    explained: set[str] = set()
    for trial in facts.imports or ():
        if trial.error is None or _NUMPY.search(trial.error):
            continue
        culprit = normalize(trial.culprit or trial.name)
        if trial.name in explained or culprit in explained or any(f"'{name}" in trial.error for name in explained):
            continue
        explained |= {trial.name, culprit}
        yield _import_error(facts, trial, culprit)


def _import_error(facts: Environment, trial: ImportTrial, culprit: str) -> EnvironmentProblem:
    error = " ".join((trial.error or "").split())
    missing = re.search(r"No module named '([\w.]+)'", error)
    if missing and normalize(missing[1].partition(".")[0]) not in facts.versions:
        name = normalize(missing[1].partition(".")[0])
        return EnvironmentProblem(
            "import-needs-package",
            "broken",
            f"{trial.name} needs `{name}`, which is not installed",
            f"importing {trial.name} fails: {error}",
            "install it",
            [pip_install(facts.python, name)],
            frozenset({trial.name, culprit}),
        )
    library = re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file", error)
    why = f"the library `{library[1]}` is not on this machine" if library else f"importing it fails: {error}"
    name = culprit if culprit in facts.versions else trial.name
    return EnvironmentProblem(
        "import-fails",
        "broken",
        f"{trial.name} {facts.versions.get(trial.name, '')} cannot be imported".replace("  ", " "),
        why,
        f"install {name} again",
        # Not its requirements, which may be torch: a download of gigabytes.
        [
            pip_install(facts.python, "--upgrade", "--force-reinstall", "--no-deps", name),
            pip_install(facts.python, name),
        ],
        frozenset({trial.name, culprit}),
        [error],
    )
