"""What tests of several folders share."""

import atexit
import gc
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from examples_limit import examples
from tunewell.core.features import features

os.environ["AWS_EC2_METADATA_DISABLED"] = "true"  # no test asks the metadata service of a cloud machine for keys
# One torch thread per process: two workers with two threads each wait for each other on two cores, and tiny models
# then take up to ten times as long. Set before torch is imported, and inherited by child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of a test that asks for two sleep instead of spinning

# One folder for everything that tests write outside their own folders: caches start empty, and nothing is left behind.
# Worker processes inherit it. `pytest --basetemp FOLDER` keeps the folders of tests.
if "TUNEWELL_TESTS_FOLDER" not in os.environ:
    _folder = tempfile.mkdtemp(prefix="tunewell-tests-")
    os.environ |= {"TUNEWELL_TESTS_FOLDER": _folder, "TMPDIR": _folder, "TUNEWELL_CACHE": str(Path(_folder) / "cache")}
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
tempfile.tempdir = None

# A busy machine is slow at times; that is no failure of what is tested.
settings.register_profile(
    "patient", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# Test folders are no packages, so a helper in one of them is only importable from another by its folder.
for _folder in (
    "cli",
    "data",
    "evaluation",
    "scoring",
    "export",
    "faults",
    "features/compare",
    "features/diagnose",
    "features/doctor",
    "features/hf_callback",
    "features/notebook",
    "features/profile",
    "features/remote",
    "features/retrieval",
    "features/serve",
    "features/sweep",
    "features/track",
    "features/watch",
    "hardening",
    "inference",
    "machine",
    "model_files",
    "models",
    "planning",
    "training",
    "workflows",
):
    sys.path.append(str(Path(__file__).parent / _folder))


# Imports create two million objects that live as long as the process. Each full collection walked all of them (half a
# second), and in forked children each walk copied their pages too.
gc.disable()

_SLOW_SECONDS = Path(__file__).with_name("slow_seconds.json")
"""Seconds of each slow test, written by `pytest -m slow --record-slow`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose slow tests by their time."""
    parser.addoption("--slow-seconds", type=float, help="run the shortest slow tests, which take this long together")
    parser.addoption("--record-slow", action="store_true", help="write the seconds of the tests that run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of absent features and, with `--slow-seconds`, the slow tests that do not fit.

    A slow test without a record does not fit.
    """
    _leave_out([item for item in items if not _used_features(item) <= features().keys()], config, items)
    limit = config.getoption("slow_seconds")
    if limit is None:
        return
    known: dict[str, float] = json.loads(_SLOW_SECONDS.read_text(encoding="utf-8"))
    order = sorted(known, key=lambda name: (known[name], name))
    totals = accumulate(known[name] for name in order)
    chosen = {name for name, total in zip(order, totals, strict=True) if total <= limit}
    slow = [item for item in items if item.get_closest_marker("slow")]
    _leave_out([item for item in slow if _function(item.nodeid) not in chosen], config, items)


def _used_features(item: pytest.Item) -> set[str]:
    """Return the features that a test of the spine uses: `@pytest.mark.uses("diagnose")`."""
    return {name for mark in item.iter_markers("uses") for name in mark.args}


def _leave_out(left_out: list[pytest.Item], config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in {*left_out}]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With `--record-slow`, write the seconds of each test that ran, over those of earlier runs."""
    if not config.getoption("record_slow"):
        return
    seconds = Counter[str]()
    for report in (one for reports in terminalreporter.stats.values() for one in reports if hasattr(one, "duration")):
        seconds[_function(report.nodeid)] += report.duration
    known = json.loads(_SLOW_SECONDS.read_text(encoding="utf-8")) if _SLOW_SECONDS.is_file() else {}
    known |= {name: round(time, 1) for name, time in seconds.items()}
    _SLOW_SECONDS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _function(nodeid: str) -> str:
    """Return the id of a test without its parameters."""
    return nodeid.partition("[")[0]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny byte-level tokenizer and a ChatML template."""
    from tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-model")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout; for tests marked `shared`."""
    root = Path(__file__).parents[1]
    return Path(os.environ.get("TUNEWELL_SHARED", root.parent / "shared")) / "data"


class _Harmless(dict[str, str]):
    def __contains__(self, item: object) -> bool:
        return True

    def __missing__(self, item: str) -> str:
        return ""


@pytest.fixture(scope="session", autouse=True)
def tried_templates() -> Iterator[None]:
    """Render the many templates of tests without trying each in a child process; `template_bombs.py` tries them."""
    from tunewell.data.templates import chat_template

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "_TRIED", _Harmless())
        yield
