"""Optional dependencies come when they are used, or say how to get them."""

import json

import pytest

from tunewell.core import optional
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
    assert caught.value.fix == optional.install_command("datasets")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, 'pip install "tunewell[export]"'),
        ({"url": "file:///my%20clone"}, 'pip install "/my clone[export]"'),
        ({"url": "file:///clone", "dir_info": {"editable": True}}, 'pip install -e "/clone[export]"'),
        (
            {"url": "https://x.org/t", "vcs_info": {"vcs": "git", "commit_id": "1a"}},
            'pip install "tunewell[export] @ git+https://x.org/t@1a"',
        ),
    ],
)
def test_the_command_adds_the_extra_to_the_same_installation(monkeypatch, origin, command):
    """A clone is on no package index: `pip install "tunewell[export]"` would fail or install another package."""
    monkeypatch.setattr(optional, "direct_url", lambda: origin)
    assert optional.install_command("export") == command
