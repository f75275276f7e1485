"""Generated pages are up to date."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_pages_are_up_to_date():
    """A map or a reference that lags behind the code sends people to the wrong file: run `make docs`."""
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    packages = sorted(path.parent.name for path in module.PACKAGE.glob("*/__init__.py"))
    assert sorted([*module.SPINE, "features"]) == packages, "the map lists every package once"
    old = [path.name for path, text in module.pages().items() if path.read_text(encoding="utf-8") != text]
    assert old == [], "run `make docs`"
