"""Inputs on which a parser failed once, and good ones: each must be read or refused, without any other error."""

from pathlib import Path

import pytest
from parsers import PARSERS, seeds

CRASHES = Path(__file__).with_name("crashes")
_FEATURES = {"log": "diagnose", "migration": "migrate", "document": "retrieval", "request": "serve", "http": "serve"}
"""The parsers of features."""


def _parameter(name: str, value: object) -> object:
    """Return a parameter of tests; the parser of a feature is tested where that feature is there."""
    return pytest.param(value, marks=pytest.mark.uses(_FEATURES[name])) if name in _FEATURES else value


@pytest.mark.parametrize("name", [_parameter(name, name) for name in PARSERS])
def test_good_inputs_are_read_or_refused(name):
    """The fuzzer starts from these."""
    for data in seeds(name):
        PARSERS[name](data)
        PARSERS[name](data[: len(data) // 2])
        PARSERS[name](data + b"\xff\x00")
    PARSERS[name](b"")


@pytest.mark.parametrize(
    "path",
    [_parameter(path.parent.name, path) for path in sorted(CRASHES.glob("*/*"))],
    ids=lambda path: f"{path.parent.name}-{path.name[:24]}",
)
def test_what_the_fuzzer_found_is_mended(path):
    PARSERS[path.parent.name](path.read_bytes())
