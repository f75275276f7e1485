"""Reading installed packages from their files: broken, double and missing metadata, torch's build."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tunewell.features.doctor import packages as reader
from tunewell.features.doctor.facts import as_environment, read_packages
from tunewell.features.doctor.registry import run_checks


def install(site: Path, name: str, version: str, requires: tuple[str, ...] = (), files: tuple[str, ...] = ()) -> Path:
    """Write a package as pip installs it."""
    module = name.replace("-", "_")
    (site / module).mkdir(parents=True, exist_ok=True)
    names = [f"{module}/__init__.py", *files]
    for file in names:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(f"__version__ = '{version}'\n")
    folder = site / f"{module}-{version}.dist-info"
    folder.mkdir()
    lines = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n\nA description.\nVersion: not a field\n")
    (folder / "RECORD").write_text("".join(f"{file},sha256=x,25\n" for file in names))
    return folder


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty site-packages folder, the only one on the path, and an empty current folder."""
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.chdir(tmp_path)
    return folder


def first(*, is_fast=False):
    found = run_checks(as_environment(reader.collect_packages(is_fast=is_fast)))
    return (found[0].id, found[0].level) if found else None


def test_a_sound_environment_has_no_findings(site):
    """A finding in a sound environment makes all findings worthless."""
    install(site, "torch", "2.13.0")
    install(site, "transformers", "5.22.2", ("tokenizers>=0.23", 'tensorflow; extra == "tf"'))
    install(site, "tokenizers", "0.23.3", ('pywin32; sys_platform == "win32"',))
    assert first() is None
    assert first(is_fast=True) is None


@pytest.mark.parametrize("is_fast", [False, True])
def test_metadata_without_its_file_is_broken(site, is_fast):
    """An interrupted uninstall leaves a folder from which no version can be read."""
    (install(site, "transformers", "5.22.2") / "METADATA").unlink()
    assert first(is_fast=is_fast) == ("metadata-broken", "broken")


def test_two_versions_in_one_folder_are_found(site):
    """Files of both are mixed, and the reported version is a matter of luck."""
    install(site, "peft", "0.17.1")
    install(site, "peft", "0.21.2")
    assert first() == ("metadata-double", "broken")


def test_one_version_in_two_formats_is_sound(site):
    """Debian ships `cryptography` with a `.dist-info` and an `.egg-info`; the fix would remove files of dpkg."""
    install(site, "cryptography", "38.0.4")
    old = site / "cryptography.egg-info"
    old.mkdir()
    (old / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: cryptography\nVersion: 38.0.4\n")
    assert first() is None


def test_files_without_metadata_are_found_with_their_version(site):
    """transformers asks the metadata for the version of tokenizers and fails."""
    import shutil

    shutil.rmtree(install(site, "tokenizers", "0.23.3"))
    found = run_checks(as_environment(reader.collect_packages()))
    assert found[0].id == "metadata-missing"
    assert '"tokenizers==0.23.3"' in found[0].commands[0]


def test_deleted_and_empty_files_are_found(site):
    """A full disk during an installation leaves empty files."""
    folder = install(site, "peft", "0.21.2", files=("peft/model.py", "peft/tuners/lora.py"))
    (site / "peft" / "model.py").unlink()
    (site / "peft" / "__init__.py").write_text("")
    found = run_checks(as_environment(reader.collect_packages()))
    assert found[0].id == "files-missing"
    assert "2 of 3 files" in found[0].what
    assert folder.is_dir()


def test_folders_of_an_interrupted_pip_are_found(site):
    """pip renames a package to `~name` while it removes it."""
    (site / "~ransformers").mkdir()
    assert first() == ("metadata-leftover", "warning")


def test_missing_and_unmet_requirements_are_told_apart(site):
    """A missing package fails at once; another version may work."""
    install(site, "datasets", "5.2.0", ("xxhash", "fsspec<=2026.9.0"))
    install(site, "fsspec", "2027.1.0")
    found = run_checks(as_environment(reader.collect_packages()))
    assert [(one.id, one.level) for one in found] == [
        ("requirement-missing", "broken"),
        ("requirement-unmet", "warning"),
    ]
    assert '"fsspec<=2026.9.0"' in found[1].commands[0]


def test_requirements_of_unrelated_packages_are_not_checked(site):
    """`pip check` reports every package of a large environment; most do not matter for training."""
    install(site, "flask", "3.0", ("werkzeug>=3",))
    assert first() is None


def test_torchvision_of_another_torch_is_named(site):
    """transformers imports torchvision and fails with a message about an operator."""
    install(site, "torch", "2.13.0")
    install(site, "torchvision", "0.26.0", ("torch==2.11.0", "numpy"))
    install(site, "numpy", "2.4.6")
    found = run_checks(as_environment(reader.collect_packages()))
    assert [one.id for one in found] == ["torch-extension-mismatch"]
    assert "torchvision torch==2.13.0" in found[0].commands[0].replace('"', "")


def test_the_build_of_torch_is_read_without_importing_it(site):
    """torch may be what is broken."""
    install(site, "torch", "2.13.0")
    text = "__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    (site / "torch" / "version.py").write_text(text)
    torch = as_environment(reader.collect_packages()).torch
    assert torch is not None
    assert (torch.version, torch.cuda, torch.hip) == ("2.13.0+cu130", "13.0", None)


def test_a_file_that_hides_a_package_is_found(site):
    """`datasets.py` in the current folder is imported instead of datasets."""
    Path("datasets.py").write_text("")
    assert first() == ("package-shadowed", "warning")
    Path("pyproject.toml").write_text("")
    assert first() is None


def test_the_reader_runs_alone_in_another_interpreter():
    """`--python` runs it in an environment that has none of tunewell's packages."""
    command = [sys.executable, "-I", "-S", str(Path(reader.__file__))]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["python"]["version"].startswith("3.")
    assert found["packages"] == []  # `-S`: no site-packages


def test_the_packages_of_another_interpreter_are_read():
    """The same interpreter, asked from outside, has the same packages."""
    assert read_packages(sys.executable).versions == read_packages(None).versions
