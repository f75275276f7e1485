"""The rooms keep their doors shut: who imports whom, and who needs torch."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tunewell

PACKAGE = Path(tunewell.__file__).parent
ROOT = PACKAGE.parents[1]
TORCH_FREE = [
    "core",
    "config",
    "records",
    "data",
    "planning",
    "models/facts.py",
    "hardware/facts.py",
]


def modules_of(room: str) -> list[str]:
    place = PACKAGE / room
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    parts = [file.relative_to(PACKAGE.parent).with_suffix("").parts for file in files]
    return [".".join(part).removesuffix(".__init__") for part in parts]


@pytest.mark.parametrize("room", TORCH_FREE)
def test_a_torch_free_room_imports_without_torch(room):
    """import-linter sees our imports; only a fresh process sees what they drag in."""
    check = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules_of(room)!r}];"
        "heavy = {'torch', 'transformers', 'datasets', 'rich', 'typer'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_costs_nothing():
    """`import tunewell` in a notebook must not load a framework, nor anything else."""
    check = "import sys, tunewell; print(sorted(set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    loaded = ast.literal_eval(done.stdout)
    assert [name for name in loaded if name.startswith("tunewell.")] == []
    assert not {"torch", "transformers", "datasets", "numpy", "pyarrow", "pydantic", "tokenizers"} & set(loaded)


def test_every_name_of_the_package_can_be_had():
    """A lazy export that points nowhere fails only when somebody asks."""
    for name in tunewell.__all__:
        assert getattr(tunewell, name) is not None
    assert set(tunewell.__all__) <= set(dir(tunewell))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = tunewell.nothing_like_it


def test_only_the_package_asks_for_its_own_version():
    """On a source tree that nobody installed the question fails, in a run at its first checkpoint."""
    asking = [
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", getattr(call.func, "attr", None)) == "version"
        and any(isinstance(value, ast.Constant) and value.value == "tunewell" for value in call.args)
    ]
    assert asking == ["__init__.py"]


def test_every_init_but_the_top_one_is_empty():
    """An `__init__` that imports hides its imports from the contracts and slows everyone."""
    filled = [str(file) for file in PACKAGE.rglob("__init__.py") if file.read_bytes() and file.parent != PACKAGE]
    assert filled == []


def test_every_folder_with_code_is_a_package():
    """A forgotten `__init__.py` works here and is missing from the contracts."""
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_there_is_no_room_for_leftovers():
    """`utils` is where structure goes to die."""
    leftovers = {"utils", "common", "helpers", "misc", "util", "helper"}
    assert [str(path) for path in PACKAGE.rglob("*") if path.stem in leftovers] == []


def test_the_import_contracts_hold():
    """Layers, torch-free rooms, screens only in cli, no circles."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_imports():
    """A module nobody imports yet can rot unseen."""
    for room in (folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()):
        for name in modules_of(room):
            importlib.import_module(name)
