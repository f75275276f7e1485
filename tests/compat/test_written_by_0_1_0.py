"""Files that tunewell 0.1.0 wrote still open, resume, validate and verify; its flags, keys and JSON are still there.

The files lie in `written_by_0_1_0`; `make_fixtures.py` made them, and the golden files beside them, with 30baead. Only
the command line, `tunewell.open_corpus` and the files on disk are used here, so that moved modules do not touch this;
an export is proven in this process, which saves seconds of imports.
"""

import contextlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from exports import prove_exports_here

import tunewell
from tunewell.cli.main import main

WRITTEN = Path(__file__).resolve().parent / "written_by_0_1_0"
COMMANDS = (
    *("init", "inspect", "prepare", "train", "validate", "export", "verify"),
    *("notebook", "chat", "serve", "explain", "glossary", "schema"),
)
JSON_COMMANDS: dict[str, list[str]] = {
    "init": ["init", "rows.jsonl", "--model", "base", "--out", "new.yaml"],
    "inspect": ["inspect", "corpus"],
    "inspect rows": ["inspect", "rows.jsonl"],
    "prepare": ["prepare"],
    "train": ["train", "--resume", "--out", "run_lora", "--no-supervisor"],
    "train by its own settings": ["train", "--resume", "--out", "run_full", "--no-supervisor"],
    "validate": ["validate", "run_finished", "--device", "cpu"],
    "export": ["export", "run_finished", "--to", "adapter", "--out", "new-export"],
    "verify": ["verify", "export", "--base", "base"],
    "notebook": ["notebook", "--out", "new.ipynb", "--package", "none"],
    "chat": ["chat", "run_finished", "--prompt", "Is the door red?", "--length", "8", "--device", "cpu"],
    "explain": ["explain", "train.epochs"],
    "explain all": ["explain"],
    "glossary": ["glossary", "epoch"],
}
"""Every command that prints JSON and ends (`serve` does not end), each run in a copy of the files of its own."""
WITHOUT_CONFIG = ("train by its own settings",)
"""Commands that are run in a folder without `tunewell.yaml`."""
OPEN_MAPS = frozenset({"versions", "machine", "stages", "seconds", "dropped", "faults", "formats", "notes"})
"""Maps whose keys depend on the machine or on what happened."""
WITHDRAWN_FLAGS = {"validate": {"--against"}}
"""`compare RUN RUN` takes its place."""
RECOMMENDED = {"method.rank", "method.alpha", "train.epochs", "train.schedule", "train.warmup", "train.batch_documents"}
"""Now `auto`; a run that is resumed keeps the values of its plan."""
CHANGED_DEFAULTS = RECOMMENDED | {"verdict.min_right", "verdict.max_forgetting"}
"""The threshold of the task, and a stricter limit: both are in the changelog."""
OTHER_KEYS = {"validate": {"judge.origins.derived"}}
"""The rows are choices now, which have no derived keys."""


def _if_there(command: str) -> Any:
    """Return a command as a parameter of tests; the command of a feature is tested where that feature is there."""
    return pytest.param(command, marks=pytest.mark.uses(command)) if command in ("notebook", "serve") else command


@dataclass(frozen=True)
class Ran:
    """What a command came to."""

    code: int
    out: str
    err: str
    folder: Path

    def told(self) -> dict[str, Any]:
        """Read the JSON that it printed."""
        return json.loads(self.out)


def run_in(folder: Path, arguments: Sequence[str]) -> Ran:
    """Run a command in this process and in a folder."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("CI", "1")
        prove_exports_here(patched)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(arguments))
    return Ran(code, out.getvalue(), err.getvalue(), folder)


def run_json_command(name: str, folder: Path) -> Ran:
    """Run one of the commands that print JSON in a new copy of the files."""
    copy = Path(shutil.copytree(WRITTEN, folder))
    if name in WITHOUT_CONFIG:
        (copy / "tunewell.yaml").unlink()
    return run_in(copy, [*JSON_COMMANDS[name], "--json"])


def key_paths(value: Any, path: str = "") -> set[str]:
    """List the keys of a JSON value with the keys around them; the entries of a list are taken together."""
    if isinstance(value, list):
        return {found for entry in value for found in key_paths(entry, f"{path}[]")}
    if not isinstance(value, dict) or path.rpartition(".")[2] in OPEN_MAPS:
        return set()
    inner = {f"{path}.{key}".lstrip("."): entry for key, entry in value.items()}
    return {*inner, *(found for key, entry in inner.items() for found in key_paths(entry, key))}


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Read the step events of a run."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "step"]


def newest_checkpoint(run: Path) -> int:
    """Give the step of a run's newest checkpoint."""
    return max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def golden(name: str) -> Any:
    """Read what 0.1.0 made of the files."""
    return json.loads((WRITTEN / "golden" / f"{name}.json").read_text(encoding="utf-8"))


def numbers_of(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """List the numbers in a JSON value, each with the keys that lead to it."""
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_of(entry, f"{path}.{key}".lstrip("."))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def schema_keys(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """List the config keys of a JSON Schema that hold values, and what is said of each."""
    for name, described in schema["properties"].items():
        # A group of keys, or a list of groups as in `data.sources`.
        inner = [one for one in (described, *described.get("anyOf", ())) if one.get("properties")]
        for one in inner:
            yield from schema_keys(one, f"{prefix}{name}.")
        if described not in inner:
            yield prefix + name, described


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Compute on one core: models this small gain nothing from a second, and wait for it on a busy machine."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Written:
    """The files, and each command on them run once, when it is first asked for."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._ran: dict[str, Ran] = {}

    def ran(self, name: str) -> Ran:
        """Give what a command came to."""
        if name not in self._ran:
            self._ran[name] = run_json_command(name, self._home / name.replace(" ", "-"))
        return self._ran[name]


@pytest.fixture(scope="module", autouse=True)
def _on_one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Copies of the files, for the commands that print JSON."""
    return Written(tmp_path_factory.mktemp("written"))


def test_inspect_counts_what_the_manifest_of_an_old_corpus_says(written: Written) -> None:
    """Guards against a manifest whose fields are read under other names, and so as nothing."""
    ran = written.ran("inspect")
    manifest = json.loads((WRITTEN / "corpus" / "manifest.json").read_text(encoding="utf-8"))
    assert ran.code == 0, ran.err
    told = ran.told()
    for name in ("rows_in", "documents", "held_out", "dropped", "tokens", "packing", "corpus_sha256"):
        assert told[name] == manifest[name], name


def test_an_old_corpus_reads_as_the_same_documents(tmp_path: Path) -> None:
    """Guards against shards or an index that are cut at other places than they were written with."""
    corpus = tunewell.open_corpus(shutil.copytree(WRITTEN / "corpus", tmp_path / "corpus"), verify=True)
    for name, split in (("train", corpus), ("held_out", corpus.held_out)):
        expected = golden("corpus")[name]
        assert len(split) == expected["documents"]
        assert {key: split[0][key] for key in expected["first"]} == expected["first"]


def test_prepare_makes_the_same_corpus_from_the_same_rows(written: Written) -> None:
    """Guards against other bytes from equal rows, after which no run that began before could go on."""
    ran = written.ran("prepare")
    assert ran.code == 0, ran.err
    manifests = (folder / "corpus" / "manifest.json" for folder in (WRITTEN, ran.folder))
    before, now = (json.loads(path.read_text(encoding="utf-8")) for path in manifests)
    assert now["corpus_sha256"] == before["corpus_sha256"]
    other = {"README.md": None}  # the card may be worded otherwise
    assert now["files"] | other == before["files"] | other


@pytest.mark.parametrize(
    ("name", "run"), [("train", "run_lora"), ("train by its own settings", "run_full")], ids=["lora", "full"]
)
def test_an_interrupted_run_goes_on_as_it_would_have_with_0_1_0(written: Written, name: str, run: str) -> None:
    """Guards against a checkpoint whose weights, optimizer, rate or order of documents is not taken up again."""
    ran = written.ran(name)
    assert ran.code == 0, ran.err
    told, saved = ran.told(), newest_checkpoint(WRITTEN / run)
    assert told["status"] == "finished" and told["steps"] == told["num_steps"] > saved
    steps = steps_of(ran.folder / run)
    before = [step for step in steps_of(WRITTEN / run) if step["step"] <= saved]
    assert steps[: len(before)] == before, "the steps before the checkpoint were not taken again"
    expected = golden("losses")[run]
    assert [step["step"] for step in steps[len(before) :]] == [step for step, _ in expected]
    for step, (number, loss) in zip(steps[len(before) :], expected, strict=True):
        assert step["loss"] == pytest.approx(loss, rel=1e-6), f"step {number}"


def test_a_finished_run_is_judged_as_0_1_0_judged_it(written: Written) -> None:
    """Guards against a run whose adapter, base, template or held-out rows are found but read otherwise."""
    ran = written.ran("validate")
    report = json.loads((WRITTEN / "run_finished" / "report.json").read_text(encoding="utf-8"))
    assert ran.code == golden("json")["validate"]["code"], ran.err
    told = ran.told()
    assert told["verdict"] == report["verdict"]
    # The rules for what follows the cause have changed.
    assert told["reasons"][0]["code"] == report["reasons"][0]["code"]
    parts = ("held_out", "by_source", "everyday", "base_tally", "tuned_tally", "change", "ledger", "curve", "exchanges")
    expected, found = ({part: whole[part] for part in parts} for whole in (report, told))
    figures = dict(numbers_of(found))
    assert dict(numbers_of(expected)).keys() <= figures.keys(), "newer versions add numbers and remove none"
    for path, number in numbers_of(expected):
        if "right_interval" in path or path.endswith("cluster"):
            continue  # the task decides what one observation is
        assert math.isclose(figures[path], number, rel_tol=1e-4, abs_tol=1e-4), path


def test_an_old_export_is_still_proven(tmp_path: Path) -> None:
    """Guards against a proof that is computed otherwise than it was, or files that are no longer found in it."""
    copy = Path(shutil.copytree(WRITTEN, tmp_path / "copy"))
    ran = run_in(copy, ["verify", "export", "--base", "base"])
    assert ran.code == 0, ran.out + ran.err
    assert "PROVEN" in ran.out and "NOT PROVEN" not in ran.out


def test_verify_proves_every_artefact_of_an_old_export(written: Written) -> None:
    """Guards against a proof that passes because it leaves out a kind of artefact, or a check of it."""
    told = written.ran("verify").told()
    checks = {link["artefact"]: sorted(check["name"] for check in link["checks"]) for link in told["links"]}
    assert told["is_ok"]
    for artefact, names in golden("checks").items():
        assert set(names) <= set(checks[artefact]), artefact


@pytest.mark.parametrize("name", [_if_there(name) for name in JSON_COMMANDS])
def test_json_has_every_key_that_it_had(written: Written, name: str) -> None:
    """Guards against a key that scripts read and that a change of records renamed or dropped."""
    ran, expected = written.ran(name), golden("json")[name]
    assert ran.code == expected["code"], ran.err
    assert set(expected["keys"]) - key_paths(ran.told()) == OTHER_KEYS.get(name, set())


@pytest.mark.parametrize("command", [_if_there(name) for name in COMMANDS])
def test_every_flag_of_a_command_still_exists(command: str, tmp_path: Path) -> None:
    """Guards against a flag that scripts and `resume` lines give and that is unknown now."""
    flags = {
        flag: takes for flag, takes in golden("flags")[command].items() if flag not in WITHDRAWN_FLAGS.get(command, ())
    }
    for flag, takes_value in flags.items():
        # Help is shown only where everything else on the line was understood.
        ran = run_in(tmp_path, [command, f"{flag}=1" if takes_value else flag, "--help"])
        assert ran.code == 0, f"{flag}: {ran.err}"


def test_every_config_key_is_still_in_the_schema(tmp_path: Path) -> None:
    """Guards against an editor that marks a key as unknown which 0.1.0 described."""
    described = {name for name, _ in schema_keys(run_in(tmp_path, ["schema"]).told())}
    expected = golden("config")
    assert {*expected["keys"], *expected["aliases"]} - described == set()


def test_a_config_with_every_key_is_read_as_it_was() -> None:
    """Guards against a key that is refused, or that is accepted and put somewhere else."""
    for key, expected in golden("config")["keys"].items():
        ran = run_in(WRITTEN, ["explain", key, "--config", "every_key.yaml", "--json"])
        assert ran.code == 0, f"{key}: {ran.err}"
        assert ran.told()["value"] == expected["value"], key
        assert set(expected["allowed"]) <= set(ran.told()["allowed"]), key


def test_keys_that_a_run_left_unset_mean_what_they_meant() -> None:
    """Guards against a changed default: a run's `config.yaml` holds only what was set, the rest comes from here."""
    keys = {key: expected for key, expected in golden("config")["keys"].items() if key not in CHANGED_DEFAULTS}
    told = {key: run_in(WRITTEN, ["explain", key, "--json"]).told()["default"] for key in keys}
    defaults = {key: expected["default"] for key, expected in keys.items()}
    assert told == defaults


def test_the_names_other_tools_have_for_keys_are_still_read(tmp_path: Path) -> None:
    """Guards against an alias that is refused, at the top of a config or in the branch of its key."""
    config = tmp_path / "config.yaml"
    for alias, expected in golden("config")["aliases"].items():
        tree: Any = expected["value"]
        for word in reversed(alias.split(".")):
            tree = {word: tree}
        config.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML too
        ran = run_in(tmp_path, ["explain", expected["key"], "--config", "config.yaml", "--json"])
        assert ran.code == 0, f"{alias}: {ran.err}"
        assert ran.told()["value"] == expected["value"], alias


def test_nothing_but_the_export_names_the_folder_it_was_made_in() -> None:
    """Guards against fixtures that only work where they were made."""
    for path in sorted(path for path in WRITTEN.rglob("*") if path.is_file()):
        is_naming = os.fsencode("/tmp/") in path.read_bytes()
        assert not is_naming or "export" in path.relative_to(WRITTEN).parts, path
