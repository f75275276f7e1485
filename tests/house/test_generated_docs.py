"""Generated pages are up to date."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_generated_pages_are_up_to_date():
    """A map that lags behind the code sends people to the wrong file: run `make docs`."""
    module = _generator()
    packages = sorted(path.parent.name for path in module.PACKAGE.glob("*/__init__.py"))
    assert sorted([*module.SPINE, "features"]) == packages, "the map lists every package once"
    old = [path.name for path, text in module.pages().items() if path.read_text(encoding="utf-8") != text]
    assert old == [], "run `make docs`"


@pytest.mark.uses("diagnose")
def test_the_pages_of_a_release_are_complete():
    """They are not committed, so only this shows that they can be written."""
    from tunewell.cli.main import COMMANDS

    pages = _generator().release_pages()
    assert all(f"## {name}\n" in pages["reference/commands.md"] for name, _ in COMMANDS)
    assert "| `train.epochs` |" in pages["reference/config.md"]
    assert "| TRL | SFTConfig(" in pages["failures/oom-cuda.md"]


def _generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
