"""Imports in a child process: failures, crashes, hangs, and which finding they belong to."""

import sys
from dataclasses import replace

import pytest
from recorded import sound

from tunewell.features.doctor import imports
from tunewell.features.doctor.facts import ImportTrial
from tunewell.features.doctor.registry import run_checks


def trial(monkeypatch, statements, **options):
    """Run statements as if they were imports of packages."""
    monkeypatch.setattr(imports, "TRIALS", statements)
    return imports.try_imports(sys.executable, list(statements), progress=lambda _: None, **options)


@pytest.mark.slow
def test_each_kind_of_failure_is_reported_and_the_next_import_is_tried(monkeypatch):
    """A crash or a hang of one package must not hide the others, nor stop the doctor."""
    found = trial(
        monkeypatch,
        {
            "good": "print('noise on stdout'); import json",
            "bad": "import not_there",
            "crashing": "import os; os.kill(os.getpid(), 11)",
            "hanging": "import time; time.sleep(60)",
            "exiting": "raise SystemExit(3)",
            "last": "import json",
        },
        time_limit=2.0,
    )
    errors = {one.name: one.error for one in found}
    assert errors["good"] is None and errors["last"] is None
    assert errors["bad"] == "ModuleNotFoundError: No module named 'not_there'"
    assert "SIGSEGV" in (errors["crashing"] or "")
    assert errors["hanging"] == "no answer within 2 s"
    assert errors["exiting"] == "SystemExit: 3"


def test_numpys_complaint_counts_as_a_failure(monkeypatch):
    """torch prints it and goes on without NumPy, so the import succeeds."""
    text = "A module that was compiled using NumPy 1.x cannot be run in NumPy 2.4.6"
    found = trial(monkeypatch, {"torch": f"import sys; sys.stderr.write({text!r}); sys.stderr.flush()"})
    assert "NumPy 1.x" in (found[0].error or "")


def test_the_first_error_of_a_chain_is_reported(monkeypatch):
    """transformers says only that a module could not be imported; the reason is in the error before it."""
    code = "exec(\"try:\\n import no_such_package\\nexcept ImportError as e:\\n raise RuntimeError('look up') from e\")"
    error = trial(monkeypatch, {"transformers": code})[0].error or ""
    assert error.startswith("RuntimeError: look up; caused by ModuleNotFoundError: No module named 'no_such_package'")


def test_an_interpreter_that_does_not_start_ends_the_trials(monkeypatch):
    """Otherwise the same child would be started for ever."""
    monkeypatch.setattr(imports, "TRIALS", {"numpy": "import numpy"})
    assert imports.try_imports("/bin/false", ["numpy"], progress=lambda _: None) == []


def findings(facts, **errors):
    trials = [ImportTrial(name, *(errors.get(name) or (None, None))) for name in ("numpy", "pandas", "torch", "trl")]
    return run_checks(replace(facts, imports=trials))


def test_numpy_abi_names_the_package_that_was_compiled_for_the_other_numpy():
    """The error comes from datasets or trl, but pandas must be replaced."""
    error = "ValueError: numpy.dtype size changed, may indicate binary incompatibility"
    found = findings(sound({"pandas": "2.0.3"}), pandas=(error, "pandas"), trl=(error, "pandas"))
    assert [one.id for one in found] == ["numpy-abi"]
    # trl also asks for a newer pandas, which is the same cause.
    facts = sound({"pandas": "2.0.3"})
    packages = [replace(one, requires=["pandas>=2.1.1"]) if one.name == "trl" else one for one in facts.packages]
    found = findings(replace(facts, packages=packages), pandas=(error, "pandas"), trl=(error, "pandas"))
    assert [one.id for one in found] == ["numpy-abi"]
    assert "pandas 2.0.3" in found[0].what and found[0].commands[0].endswith("--upgrade pandas")


def test_a_failed_import_is_evidence_of_the_finding_that_explains_it():
    """One cause is one finding."""
    found = findings(sound({"trl": "0.8.6"}), trl=("ImportError: cannot import name 'x'", "trl"))
    assert [one.id for one in found] == ["trl-tokenizer-argument"]
    assert any("cannot import name" in text for text in found[0].evidence)


def test_an_unexplained_failure_is_a_finding():
    """Unknown damage is reported with its message."""
    found = findings(sound(), torch=("OSError: libcudnn.so.9: cannot open shared object file", "torch"))
    assert [one.id for one in found] == ["import-fails"]
    assert "libcudnn.so.9" in found[0].why
    missing = findings(sound(), trl=("ModuleNotFoundError: No module named 'rich'", "trl"))
    assert missing[0].id == "import-needs-package" and missing[0].commands[0].endswith("pip install rich")


@pytest.mark.parametrize("name", list(imports.TRIALS))
def test_the_real_trials_are_statements(name):
    """A syntax error in the table would look like a broken package."""
    compile(imports.TRIALS[name], name, "exec")


def test_errors_that_name_a_broken_package_belong_to_it():
    """transformers and trl fail because the metadata of tokenizers is gone: one cause, one finding."""
    error = "PackageNotFoundError: No package metadata was found for tokenizers"
    facts = sound(without_metadata={"tokenizers": "0.23.3"})
    found = findings(facts, torch=(error, "transformers"), trl=(error, "transformers"))
    assert [one.id for one in found] == ["metadata-missing"]


def test_a_requirement_that_the_shield_explains_is_not_repeated():
    """trl asks for a newer accelerate, and the shield says why."""
    versions = {"accelerate": "0.34.2"}
    facts = sound(versions)
    packages = [replace(one, requires=["accelerate>=1.10.1"]) if one.name == "trl" else one for one in facts.packages]
    assert [one.id for one in run_checks(replace(facts, packages=packages))] == ["accelerate-too-old"]
