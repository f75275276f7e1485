"""The wheel works where nothing else is installed, and without torch."""

import json
import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from release import build

import tunewell

ROOT = Path(tunewell.__file__).parents[2]
UV = Path(sys.executable).with_name("uv")


def call(*command: object, cwd: Path) -> str:
    # PYTHONPATH would put the checkout in front of the wheel.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=cwd, timeout=300, env=env
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _modules() -> list[str]:
    files = (ROOT / "src" / "tunewell").rglob("*.py")
    paths = [file.relative_to(ROOT / "src").with_suffix("") for file in files if file.name != "__init__.py"]
    return sorted(".".join(path.parts) for path in paths)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A venv with nothing but the wheel and what it asks for, at the pinned versions."""
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("tunewell-*.whl")
    call(UV, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    call(
        UV, "pip", "install", "--quiet", "--python", python, "--constraint", ROOT / "constraints.txt", wheel, cwd=folder
    )
    return folder / "venv" / "bin"


@pytest.mark.slow
def test_the_wheel_runs_from_a_bare_venv(bare, tmp_path):
    """A data file left out of the wheel, or a dependency only the developers have, shows here and nowhere else."""
    assert call(bare / "tunewell", "--version", cwd=tmp_path).startswith("tunewell 0.")
    assert call(bare / "tunewell", "glossary", "unparsable", cwd=tmp_path).startswith("unparsable ")
    assert "packing.context_length" in call(bare / "tunewell", "explain", cwd=tmp_path)
    assert '"$schema"' in call(bare / "tunewell", "schema", cwd=tmp_path)


@pytest.mark.slow
def test_the_wheel_prepares_a_corpus_without_torch(bare, tmp_path, tiny_model):
    """The whole path, from rows to a corpus, on what `pip install` brings and nothing else."""
    rows = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    call(bare / "tunewell", "init", "rows.jsonl", "--model", tiny_model, cwd=tmp_path)
    report = json.loads(call(bare / "tunewell", "prepare", "--json", cwd=tmp_path))
    assert report["rows_in"] == 50 == report["documents"] + report["held_out"]
    assert "It is" in call(bare / "tunewell", "inspect", "corpus", cwd=tmp_path).replace("[", "").replace("]", "")


@pytest.mark.slow
def test_the_wheel_brings_no_framework(bare, tmp_path):
    """`prepare` and `inspect` are promised without torch; here it is provably absent."""
    check = "import importlib.util as u; print([n for n in ('torch', 'transformers', 'datasets') if u.find_spec(n)])"
    assert call(bare / "python", "-c", check, cwd=tmp_path) == "[]\n"
    assert find_spec("torch"), "the developers' venv has torch, so its absence above means something"


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> list[Path]:
    """The files of HEAD, built from two clones."""
    folders = []
    for name in ("one", "two"):
        folder = tmp_path_factory.mktemp(name)
        call("git", "clone", "--quiet", ROOT, folder / f"clone-{name}", cwd=folder)
        build("HEAD", folder / "dist", root=folder / f"clone-{name}")
        folders.append(folder / "dist")
    return folders


@pytest.mark.slow
def test_two_clones_give_the_same_files(releases):
    """Whoever doubts a release can build it again and compare."""
    contents = [{path.name: path.read_bytes() for path in folder.glob("tunewell-*")} for folder in releases]
    assert len(contents[0]) == 2 and contents[0] == contents[1]


@pytest.mark.slow
def test_the_sdist_installs_where_nothing_else_is_and_holds_no_private_file(releases, tmp_path):
    (sdist,) = releases[0].glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"SECURITY.md", "LICENSE", "src/tunewell/__init__.py", "tests/conftest.py"} <= set(names)
    assert not [name for name in names if name.startswith((".venv", ".git/", "dist", ".fuzz"))]
    call(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pins = ("--constraint", ROOT / "constraints.txt")
    call(UV, "pip", "install", "--quiet", "--python", python, *pins, sdist, cwd=tmp_path)
    assert call(python.with_name("tunewell"), "--version", cwd=tmp_path).startswith("tunewell 0.")
    assert '"$schema"' in call(python.with_name("tunewell"), "schema", cwd=tmp_path)


IMPORT_ALL = """
import importlib, pkgutil, tunewell
optional = {"torch", "transformers", "safetensors", "gguf", "starlette", "uvicorn", "openai", "peft"}
imported = []
for module in pkgutil.walk_packages(tunewell.__path__, "tunewell."):
    try:
        importlib.import_module(module.name)
        imported.append(module.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in optional:
            raise
print("\\n".join(imported))
"""


@pytest.mark.slow
def test_what_needs_no_extra_imports_without_one(bare, tmp_path):
    """What the torch-free rooms import at their top must be among the declared dependencies."""
    imported = call(bare / "python", "-c", IMPORT_ALL, cwd=tmp_path).split()
    rooms = ("core", "config", "records", "data", "planning", "diagnosis", "cli")
    ours = [name for name in _modules() if name.split(".")[1] in rooms]
    assert len(ours) > 60 and [name for name in ours if name not in imported] == []
    where = call(bare / "python", "-c", "import tunewell; print(tunewell.__file__)", cwd=tmp_path)
    assert Path(where).is_relative_to(bare.parent)
