"""The command that resumes a run can be pasted in the folder where the run was started."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunewell.config.load import LoadedConfig, load_config, to_loaded_config
from tunewell.core.errors import UserError
from tunewell.evaluation.metrics import load_metrics
from tunewell.export.options import ExportOptions
from tunewell.records.healing import HealingEntry
from tunewell.runs.config import RunOptions, dump_config, load_for_run, require_inputs, resume_command
from tunewell.runs.result import advice


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, rows, and configs here and elsewhere; everything has a space in its name."""
    monkeypatch.chdir(tmp_path)
    for name in ("my model", "some config", "more rows"):
        Path(name).mkdir()
    for name in ("my rows.jsonl", "more rows/a.jsonl"):
        Path(name).write_text("{}\n")
    for name in ("tunewell.yaml", "some config/tunewell.yaml"):
        Path(name).write_text("train:\n  epochs: 2\n")
    return tmp_path


def _start(loaded: LoadedConfig, *argv: str) -> RunOptions:
    """Write what a run writes when it starts, and return the options of its command line."""
    run = loaded.path(loaded.config.run)
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(dump_config(loaded, argv))
    return RunOptions(argv=argv)


def test_a_run_with_a_config_file_repeats_its_arguments(here: Path) -> None:
    argv = ["--config", "some config/tunewell.yaml", "--out", "my run", "--data", "my rows.jsonl#5", "--json"]
    loaded = load_config(Path("some config/tunewell.yaml"), ['run="my run"'], data=["my rows.jsonl#5"])
    command = resume_command(loaded, _start(loaded, *argv))
    assert shlex.split(command) == ["tunewell", "train", "--resume", *argv]


@pytest.mark.parametrize(
    "added",
    [
        ["--resume", "--allow-change", "seed", "--worker", "7,8,9"],
        ["--allow-change=seed", "--supervised=7,8,9", "--resume"],
    ],
)
def test_flags_of_one_start_are_not_repeated(here: Path, added: list[str]) -> None:
    """`--allow-change` once allowed the same change on every later resume."""
    loaded = load_config(None, seed=7)
    command = resume_command(loaded, _start(loaded, *added, "--seed", "7"))
    assert command == "tunewell train --resume --seed 7"


def test_what_the_config_says_is_not_said_again(here: Path) -> None:
    loaded = load_config()
    assert resume_command(loaded, _start(loaded)) == "tunewell train --resume"


def test_rows_that_the_config_was_written_for_are_not_named_again(here: Path) -> None:
    """`tunewell train rows.csv` writes the config. Ctrl-C named the rows to resume, and `tunewell` did not."""
    loaded = load_config()
    assert resume_command(loaded, _start(loaded, "my rows.jsonl")) == "tunewell train --resume"


def test_the_config_of_a_run_names_the_command_that_started_it(here: Path) -> None:
    argv = ["--data", "my\nrows", "--worker", "7,8,9", "--model", "hf_abcdefghijklmnopqrstuvwxyz012345", "\udc80"]
    text = dump_config(load_config(), argv)
    first = text.splitlines()[0]
    assert first.startswith("# tunewell train --data 'my rows' --model ") and "hf_" not in text and "7,8,9" not in text
    assert load_config({"train": {"epochs": 2}}).config.train == load_config().config.train


def test_where_flags_were_all_there_was_the_run_has_them(here: Path) -> None:
    Path("tunewell.yaml").unlink()
    typed = load_config(None, ['run="my run"'], model="my model", data="my rows.jsonl#5", seed=7)
    options = _start(typed, "--out", "my run")
    assert resume_command(typed, options) == "tunewell train --resume --out 'my run'"
    own = load_for_run(None, ['run="my run"'], is_resuming=True)
    assert own.config.model_dump() == typed.config.model_dump() and own.base == typed.base
    assert resume_command(own, options) == resume_command(typed, options)
    assert load_for_run(None, ['run="my run"'], is_resuming=False).config.model is None
    more = load_for_run(None, ['run="my run"', "data.sources[0].limit=4"], is_resuming=True)
    assert more.config.data.sources[0].limit == 4
    _start(load_config(None, model="my model", data="my rows.jsonl"))
    assert load_for_run("", is_resuming=True).config.model == "my model"


@pytest.mark.parametrize("link", ["run", "scratch"])
def test_a_run_behind_a_link_finds_what_it_was_given(here: Path, link: str) -> None:
    """The way up from a link is not the way that was come."""
    Path("tunewell.yaml").unlink()
    (here / "disk" / "far" / "off").mkdir(parents=True)
    Path(link).symlink_to(here / "disk" / "far" / "off")
    run = "run" if link == "run" else "scratch/run"
    typed = load_config(None, [f"run={run}"], model="my model", data="my rows.jsonl")
    _start(typed)
    assert load_for_run(None, [f"run={run}"], is_resuming=True).config.model_dump() == typed.config.model_dump()
    read = load_config(Path(run, "config.yaml"))
    assert read.path(read.config.model or "").samefile("my model")
    assert read.path(read.config.data.sources[0].path).samefile("my rows.jsonl")


def test_it_says_everything_where_the_run_does_not(here: Path) -> None:
    """A secret was taken out, another config would be found, or the run was begun with less."""
    Path("tunewell.yaml").unlink()
    secret = "hf_abcdefghijklmnopqrstuvwxyz012345"
    Path(secret).mkdir()
    hidden = load_config(model=secret, data="my rows.jsonl")
    flags = ["--model", secret, "--data", "my rows.jsonl"]
    assert (
        resume_command(hidden, _start(hidden, *flags))
        == f"tunewell train --resume --model {secret} --data 'my rows.jsonl'"
    )
    with pytest.raises(UserError, match="secret was removed"):
        load_for_run(None, is_resuming=True)
    plain = load_config(model="my model", data="my rows.jsonl")
    flags = ["--model", "my model", "--data", "my rows.jsonl"]
    options = _start(plain, *flags)
    assert resume_command(plain, options) == "tunewell train --resume"
    changed = load_config(None, ["train.epochs=9"], model="my model", data="my rows.jsonl")
    more = RunOptions(argv=[*flags, "--set", "train.epochs=9"])
    assert resume_command(changed, more).endswith("--set train.epochs=9")
    Path("tunewell.yml").write_text("seed: 1\n")
    assert resume_command(plain, options) == "tunewell train --resume --model 'my model' --data 'my rows.jsonl'"


@pytest.mark.parametrize("text", ["1e5", "0o17", "0x1F", "12:30:45", "~", "null", "yes", "2025-01-01", ".inf", ""])
def test_text_that_looks_like_something_else_stays_text_in_the_run(here: Path, text: str) -> None:
    typed = load_config({"model": "my model", "data": {"sources": [{"path": "my rows.jsonl", "system": text}]}})
    _start(typed)
    assert load_config(Path("run/config.yaml")).config.data.sources[0].system == text


def test_what_a_program_handed_over_is_taken_from_the_run(here: Path) -> None:
    """Nothing was typed that could be typed again."""
    loaded = to_loaded_config({"model": "my model", "run": "my run"})
    words = "tunewell train --resume --config 'my run/config.yaml' --out 'my run'"
    assert resume_command(loaded, RunOptions()) == words


def test_metric_functions_are_found_from_the_run_folder(here: Path) -> None:
    """`validate` loads the run's config.yaml: a path that holds only beside tunewell.yaml would be lost."""
    Path("metrics.py").write_text("def exact(question, answer, reference):\n    return answer == reference\n")
    loaded = load_config(sets=["verdict.metrics=[metrics.py:exact]", 'run="runs of today"'], model="my model")
    _start(loaded)
    saved = load_config(here / "runs of today" / "config.yaml")
    assert saved.config.verdict.metrics == ("../metrics.py:exact",)
    assert list(load_metrics(saved.config.verdict.metrics, base=saved.base)) == ["exact"]


def test_a_run_that_came_without_its_model_says_whose_config_names_it(here: Path) -> None:
    """On another machine, `--resume` in a folder without a config named a model of which nobody there had heard."""
    Path("rows.jsonl").write_text("{}")
    loaded = load_config({"model": "./gone", "data": {"sources": "rows.jsonl"}})
    for is_resuming, where in ((True, "config of the run"), (False, "neither a file")):
        with pytest.raises(UserError, match="gone") as error:
            require_inputs(loaded, is_resuming=is_resuming)
        assert where in str(error.value.where)


def test_a_run_that_diverged_names_one_rate():
    """Guards three rates for one divergence: its reason names one, so the advice has no second."""
    rewound = HealingEntry(8, "lr-too-high", "fault", "rewind", "the loss rose", rate_share=0.5)
    stopped = HealingEntry(9, "lr-too-high", "fault", "stop", "the loss rose")
    assert any("multiply `train.learning_rate` by 0.5" in line for line in advice([rewound]))
    assert not any("train.learning_rate" in line for line in advice([rewound, stopped]))


def test_the_ollama_name_of_a_run_is_that_of_its_rows():
    """`ollama run run` names nothing: most runs are in a folder `run`."""
    loaded = load_config({"data": {"sources": "Kundenfragen 2026.csv"}})
    ref = SimpleNamespace(kind="run", loaded=loaded, adapter=None, base=None, path=Path("run"))
    assert ExportOptions(to="ollama").checked().resolved(ref).name == "kundenfragen-2026"
