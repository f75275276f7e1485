"""Texts on pages and in views of results."""

from tunewell.core.html import in_python


def test_commands_become_calls_in_a_notebook():
    """Guards advice that a notebook cannot run: `tunewell train --set ...`."""
    text = "`tunewell train --config 'my run/config.yaml' --out run2 --set train.epochs=6 --set seed=1`: longer."
    call = "`tunewell.train('my run/config.yaml', out='run2', sets=['train.epochs=6', 'seed=1'])`: longer."
    assert in_python(text) == call
    assert in_python("`tunewell models` and `x`") == "`tunewell models` and `x`"
