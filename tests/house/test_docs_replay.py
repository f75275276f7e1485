"""Console blocks in the README and the guides are replayed: what they show is what the commands print."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tunewell.cli.main import main

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [ROOT / "README.md", *(pytest.param(page, marks=pytest.mark.slow) for page in GUIDES)]
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TIME = re.compile(r"\b\d+(\.\d+)? (ms|s)\b")


def _blocks(page: Path) -> list[tuple[str, str]]:
    """List (command, shown output) of a page."""
    found = []
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def _same(text: str) -> str:
    return "\n".join(line.rstrip() for line in _TIME.sub("N s", text).strip().splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_console_blocks_of_a_page_show_what_the_commands_print(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards against a manual that lies: every command must still run and, where output is shown, print it."""
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(ROOT / "examples" / "college" / name, tmp_path / name)
    shutil.copytree(ROOT / "examples" / "college" / "pages", tmp_path / "pages")
    monkeypatch.chdir(tmp_path)
    for name, value in (("NO_COLOR", "1"), ("COLUMNS", "120"), ("CI", "1")):
        monkeypatch.setenv(name, value)
    blocks = [(command, output) for command, output in _blocks(page) if command.startswith("tunewell ")]
    assert blocks, "a page without a console block shows nothing"
    for command, output in blocks:
        code = main(shlex.split(command)[1:])
        shown, errors = capfd.readouterr()
        assert code == 0, f"{command}\n{errors}"
        if output.strip():
            assert _same(shown) == _same(output), command
