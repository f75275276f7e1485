"""Package boundaries: who imports whom, who needs torch, and how large things grow."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from counts import count, read_record

import tunewell
from tunewell.core.features import features

PACKAGE = Path(tunewell.__file__).parent
ROOT = PACKAGE.parents[1]
TORCH_FREE = (
    "core",
    "config",
    "records",
    "data",
    "planning",
    "features/diagnose",
    "features/doctor",
    "model_files/facts.py",
    "model_files/shape.py",
    "machine/facts.py",
    "machine/machine.py",
    "machine/nvidia_smi.py",
    "machine/system.py",
    "machine/cards.py",
    "runs/probe.py",
    "workflows/models.py",
    "runs/state.py",
    "runs/status.py",
    "workflows/plan.py",
)
HEAVY = ("torch", "transformers", "datasets", "rich", "typer")
_IMPORT_ALL = """
import importlib, json, sys
loaded = {}
for package, modules in json.loads(sys.argv[1]).items():
    for name in modules:
        importlib.import_module(name)
    loaded[package] = sorted(set(json.loads(sys.argv[2])) & set(sys.modules))
print(json.dumps(loaded))
"""


def _modules_of(package: str) -> list[str]:
    path = PACKAGE / package
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    # The command and the screen of a feature print, so they import rich and typer.
    files = [file for file in files if file.stem not in ("command", "screen", "fallback")]
    parts = [file.relative_to(PACKAGE.parent).with_suffix("").parts for file in files]
    return [".".join(part).removesuffix(".__init__") for part in parts]


def test_torch_free_packages_import_no_torch():
    """import-linter sees our imports; only a fresh process sees what they pull in."""
    packages = json.dumps({name: _modules_of(name) for name in TORCH_FREE})
    command = [sys.executable, "-c", _IMPORT_ALL, packages, json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {name: [] for name in TORCH_FREE}


def test_importing_the_package_costs_nothing():
    """`import tunewell` in a notebook must not load a framework, nor anything else."""
    check = "import sys, tunewell; print(sorted(set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    loaded = ast.literal_eval(done.stdout)
    assert [name for name in loaded if name.startswith("tunewell.")] == []
    assert not {"torch", "transformers", "datasets", "numpy", "pyarrow", "pydantic", "tokenizers"} & set(loaded)


@pytest.mark.uses("compare", "diagnose", "doctor", "hf_callback", "retrieval", "sweep")
def test_every_public_name_can_be_imported():
    """A lazy export that points nowhere fails only when somebody uses it."""
    for name in tunewell.__all__:
        assert getattr(tunewell, name) is not None
    assert set(tunewell.__all__) <= set(dir(tunewell))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = tunewell.nothing_like_it


def test_only_the_package_asks_for_its_own_version():
    """On a source tree that is not installed the question fails, in a run at its first checkpoint."""
    asking = [
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", getattr(call.func, "attr", None)) == "version"
        and any(isinstance(value, ast.Constant) and value.value == "tunewell" for value in call.args)
    ]
    assert asking == ["__init__.py"]


def test_an_init_holds_a_docstring_and_nothing_else():
    """An `__init__` that imports hides its imports from the contracts and slows everyone."""
    wrong = []
    for file in PACKAGE.rglob("__init__.py"):
        body = ast.parse(file.read_bytes()).body
        has_docstring = len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        if file.parent != PACKAGE and not has_docstring:
            wrong.append(str(file.relative_to(PACKAGE)))
    assert wrong == []


def test_every_folder_with_code_is_a_package():
    """A forgotten `__init__.py` works here and is missing from the contracts."""
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_there_is_no_package_for_leftovers():
    """`utils` is where structure goes to die."""
    leftovers = {"utils", "common", "helpers", "misc", "util", "helper"}
    assert [str(path) for path in PACKAGE.rglob("*") if path.stem in leftovers] == []


def test_the_import_contracts_hold_for_every_package():
    """A package that a contract forgets may import anything."""
    contracts = (ROOT / ".importlinter").read_text(encoding="utf-8")
    packages = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    cycles = contracts.partition("contract:cycles")[2]
    assert [name for name in sorted(packages) if f"tunewell.{name}" not in cycles] == []
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_growth_is_recorded_with_its_reason():
    """Code that grows without a decision: `make counts` shows where, and `counts.json` has the reason."""
    found, record = count(), read_record()
    assert {name: figure for name, figure in found.items() if name not in record or figure > record[name][0]} == {}
    absent = {name for name in record if "features/" in name and name.rpartition("/")[2] not in features()}
    assert set(record) - absent <= set(found), "`counts.json` has a figure that is not counted"
