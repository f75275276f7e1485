"""Optional dependencies come when they are used, or say how to get them."""

import json

import pytest

from tunewell.core.errors import UserError
from tunewell.core.optional import import_optional


def test_what_is_installed_is_imported():
    """The usual case must not cost a message."""
    assert import_optional("json", extra="none", purpose="reading") is json


def test_what_is_missing_says_how_to_get_it():
    """`ModuleNotFoundError` does not know which extra to install."""
    with pytest.raises(UserError) as caught:
        import_optional("no_such_module_here", extra="datasets", purpose="a corpus as a dataset")
    assert caught.value.what == "a corpus as a dataset needs `no_such_module_here`"
    assert caught.value.fix == 'pip install "tunewell[datasets]"'
