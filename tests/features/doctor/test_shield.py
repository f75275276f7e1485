"""The data file of the version shield: every entry is complete, has evidence, and does what it says."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from recorded import VERSIONS, sound

from tunewell.features.doctor.packages import STACK
from tunewell.features.doctor.registry import run_checks
from tunewell.machine.shield import is_met, known_good_sets, matching_conflicts, read_shield

SHIELD = read_shield()
_ISSUE = re.compile(r"[\w.-]+/[\w.-]+#\d+")


@pytest.mark.parametrize("entry", SHIELD.conflicts, ids=lambda entry: entry.id)
def test_an_entry_has_evidence_and_known_packages(entry):
    """A rule without evidence cannot be checked or removed later; a typo in a name never matches."""
    assert re.fullmatch(r"[a-z0-9-]+", entry.id)
    assert entry.level in ("broken", "warning")
    assert any(_ISSUE.fullmatch(text) or text.startswith("metadata: ") for text in entry.evidence), entry.evidence
    assert all(_ISSUE.fullmatch(text) or text.startswith(("tried: ", "metadata: ")) for text in entry.evidence)
    names = [Requirement(text).name for text in [*entry.when, *(one for one in entry.install if one[0] != "-")]]
    assert {name.replace("_", "-") for name in names} <= set(STACK)
    assert not entry.what.endswith(".") and not entry.why.endswith(".")


@pytest.mark.parametrize("entry", SHIELD.conflicts, ids=lambda entry: entry.id)
def test_what_an_entry_installs_ends_the_conflict(entry):
    """A fix that still matches the rule would be offered for ever."""
    for requirement in map(Requirement, (text for text in entry.install if not text.startswith("-"))):
        condition = next((Requirement(text) for text in entry.when if Requirement(text).name == requirement.name), None)
        if condition is None or not requirement.specifier:
            continue
        bounds = {Version(one.version) for one in [*requirement.specifier, *condition.specifier]}
        near = {Version(f"{version}.{tail}") for version in bounds for tail in ("0", "1")} | bounds | {Version("0.1")}
        allowed = [version for version in near if version in requirement.specifier]
        assert allowed and not any(version in condition.specifier for version in allowed)


def test_ids_are_unique():
    """Two findings of one id cannot be told apart."""
    ids = [entry.id for entry in SHIELD.conflicts]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("entry", SHIELD.known_good, ids=lambda entry: f"{entry.tool} {entry.packages[1]}")
def test_a_known_good_set_has_no_conflict(entry):
    """A recommended set must not be one that the shield itself rejects."""
    versions = {}
    for requirement in map(Requirement, entry.packages):
        pinned = [one.version for one in requirement.specifier if one.operator == "=="]
        if pinned:
            versions[requirement.name] = pinned[0]
    assert len(versions) >= 4
    assert matching_conflicts(versions, SHIELD) == []


def test_the_wheel_table_is_ordered_and_bounded():
    """The first wheel that suits is installed, so newer ones come first; an empty range suits no GPU."""
    for wheel in SHIELD.wheels:
        assert Version(wheel.oldest) < Version(wheel.newest)
        SpecifierSet(wheel.torch), SpecifierSet(wheel.cuda)
        assert re.fullmatch(r"cu\d{3}", wheel.index) and _ISSUE.fullmatch(wheel.evidence)
    assert [entry.driver for entry in SHIELD.cuda] == sorted((entry.driver for entry in SHIELD.cuda), reverse=True)


def test_the_mix_of_seed_001_is_named_first():
    """trl 0.8.6 beside a new transformers imports without an error and fails in the middle of a script."""
    first = run_checks(sound({"trl": "0.8.6"}))[0]
    assert (first.id, first.level) == ("trl-tokenizer-argument", "broken")
    assert "trl 0.8.6 with transformers 5.22.2" in first.what
    assert first.commands == ['/home/ada/venv/bin/python -m pip install "trl>=0.29"']


def test_the_hybrid_of_seed_001_is_a_warning():
    """trl 0.8.6 and transformers 4.57 work together, but their scripts mix argument names."""
    found = run_checks(sound({"trl": "0.8.6", "transformers": "4.57.1", "peft": "0.15.2"}))
    assert [(finding.id, finding.level) for finding in found] == [("trl-old-arguments", "warning")]


def test_current_versions_have_no_conflict():
    """A rule without an upper bound would reject what works."""
    assert matching_conflicts(VERSIONS | {"tunewell": "0.2.0"}, SHIELD) == []


def test_a_package_that_is_not_installed_meets_nothing():
    """`trl<0.12` is not true of an environment without trl."""
    assert not is_met("trl<0.12", {"torch": "2.13.0"})
    assert not is_met("torch<2.3", {"torch": "no version"})


def test_every_package_of_the_stack_has_a_known_good_set():
    """A user asks for the package that failed, not for the tool."""
    for name in ("trl", "transformers", "peft", "unsloth", "datasets", "accelerate", "tunewell"):
        assert known_good_sets(name, SHIELD), name
    assert [entry.tool for entry in known_good_sets("trl", SHIELD)] == ["trl", "trl"]
    assert known_good_sets("flask", SHIELD) == []
