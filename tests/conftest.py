"""What tests of several folders share."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from examples_limit import examples

os.environ["AWS_EC2_METADATA_DISABLED"] = "true"  # no test asks the metadata service of a cloud machine for keys
# One torch thread per process: two workers with two threads each wait for each other on two cores, and tiny models
# then take up to ten times as long. Set before torch is imported, and inherited by child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of a test that asks for two sleep instead of spinning

# Outputs of base models must not outlive the tests, which would then measure nothing. Other caches only save time.
if "TUNEWELL_CACHE" not in os.environ:
    _cache = Path(tempfile.mkdtemp(prefix="tunewell-test-cache-"))
    _real = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tunewell"
    for _name in ("compiled", "probes", "tokenizers"):
        (_real / _name).mkdir(parents=True, exist_ok=True)
        (_cache / _name).symlink_to(_real / _name)
    os.environ["TUNEWELL_CACHE"] = str(_cache)
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)

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
