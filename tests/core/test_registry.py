"""Registries list names without importing and load an implementation on demand."""

import sys

import pytest

from tunewell.core.errors import UserError
from tunewell.core.registry import Entry, Registry

SHAPES = Registry("shape", [Entry("fraction", "An exact ratio.", "fractions:Fraction")])


def test_listing_names_imports_nothing() -> None:
    """An import path that does not exist must not matter until the entry is loaded."""
    shapes = Registry("shape", [Entry("round", "A circle.", "no_such_module:Circle")])
    assert shapes.names() == ("round",)
    assert shapes.entry("round").doc == "A circle."
    assert "no_such_module" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        shapes.load("round")


def test_an_entry_loads_the_named_object() -> None:
    from fractions import Fraction

    assert SHAPES.load("fraction") is Fraction


def test_an_unknown_name_is_an_error_with_the_known_names() -> None:
    with pytest.raises(UserError, match="unknown shape `square`") as caught:
        SHAPES.load("square")
    assert caught.value.fix == "use one of: `fraction`"


def test_a_toy_entry_can_be_added_at_run_time() -> None:
    shapes = Registry("shape", [])
    shapes.add(Entry("decimal", "A decimal number.", "decimal:Decimal"))
    assert shapes.names() == ("decimal",)
