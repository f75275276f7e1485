"""Keys that name an entry of a registry: checked, explained and described from the registry."""

import pytest

from tunewell.config.explain import json_schema
from tunewell.config.extensions import METHODS, MethodEntry
from tunewell.config.load import load_config
from tunewell.config.prices import Activations, no_weights
from tunewell.config.schema import Config
from tunewell.core.errors import UserError

COST = Activations(8, 2, 2, 4)


def test_the_schema_of_a_key_lists_the_registered_names() -> None:
    kind = json_schema()["properties"]["method"]["properties"]["kind"]
    assert kind["enum"] == list(METHODS.names())
    assert all(METHODS.entry(name).doc in kind["description"] for name in METHODS.names())


def test_an_unregistered_name_is_an_error_that_lists_the_registered_ones() -> None:
    with pytest.raises(UserError, match=r"`method\.kind` must be `lora`, `dora` or `full`, not 'lroa'"):
        load_config(None, ["method.kind=lroa"], has_file=False)


def test_an_entry_added_at_run_time_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method from outside must not need a change of the config schema."""
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    METHODS.add(
        MethodEntry("toy", "nothing", "toy_module:Toy", "Toy", is_adapter=False, trains=no_weights, activations=COST)
    )
    assert Config.model_validate({"method": {"kind": "toy"}}).method.kind == "toy"
