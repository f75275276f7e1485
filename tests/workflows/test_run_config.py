"""The command that goes on with a run can be pasted where the first one was given."""

import shlex
from pathlib import Path

import pytest

from tunewell.config.load import Loaded, as_loaded, load_config
from tunewell.workflows.run_config import config_of_run, load_for_run, resume_command


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


def _again(loaded: Loaded) -> Loaded:
    """Read the command as the shell and the command line would."""
    words = shlex.split(resume_command(loaded))
    assert words[:3] == ["tunewell", "train", "--resume"]
    pairs = list(zip(words[3::2], words[4::2], strict=True))
    given = {flag: [value for name, value in pairs if name == flag] for flag, _ in pairs}
    config = Path(given["--config"][0]) if "--config" in given else None
    model, data, seed = given.get("--model", [None])[0], given.get("--data"), given.get("--seed", [None])[0]
    return load_config(config, given.get("--set", []), model=model, data=data, seed=int(seed) if seed else None)


@pytest.mark.parametrize("config", [None, "some config/tunewell.yaml", "{here}/some config/tunewell.yaml"])
@pytest.mark.parametrize("model", ["my model", "{here}/my model", "org/name", "preset:tiny-1m", "~/models/llama"])
def test_it_means_the_same_as_the_first_one(here: Path, config: str | None, model: str) -> None:
    """Paths of a config elsewhere were printed as seen from there, and looked for one folder too far up."""
    first = load_config(
        Path(config.format(here=here)) if config else None,
        ['run="my run"', "data.held_out=more rows/a.jsonl"],
        model=model.format(here=here),
        data=["my rows.jsonl#5", "more rows/*.jsonl", "s3://bucket/rows.jsonl"],
        seed=7,
    )
    again = _again(first)
    assert again.config == first.config and again.base == first.base
    words = shlex.split(resume_command(first))
    assert "my rows.jsonl#5" in words and model.format(here=here).removeprefix(f"{here}/") in " ".join(words)


def test_what_the_config_says_is_not_said_again(here: Path) -> None:
    assert resume_command(load_config()) == "tunewell train --resume"


def test_where_flags_were_all_there_was_the_run_has_them(here: Path) -> None:
    """What has a secret taken out is typed again: the run's own config would not find it."""
    Path("tunewell.yaml").unlink()
    typed = load_config(None, ['run="my run"'], model="my model", data="my rows.jsonl#5", seed=7)
    assert resume_command(typed) == "tunewell train --resume --out 'my run'"
    Path("my run").mkdir()
    Path("my run/config.yaml").write_text(config_of_run(typed))
    own = load_for_run(None, ['run="my run"'], is_resuming=True)
    assert own.path(own.config.run).samefile("my run")
    assert [own.path(source.path).resolve() for source in own.config.data.sources] == [here / "my rows.jsonl"]
    assert own.path(own.config.model or "").samefile("my model")
    assert (own.config.seed, own.config.data.sources[0].limit) == (7, 5)
    assert own.path(own.config.corpus).resolve() == here / typed.config.corpus
    assert resume_command(own) == resume_command(typed)
    assert load_for_run(None, ['run="my run"'], is_resuming=False).config.model is None
    Path("hf_abcdefghijklmnopqrstuvwxyz012345").mkdir()
    secret = load_config(None, ['run="my run"'], model="hf_abcdefghijklmnopqrstuvwxyz012345", data="my rows.jsonl")
    assert "hf_abcdefghijklmnopqrstuvwxyz012345" in resume_command(secret)


def test_what_a_program_handed_over_is_taken_from_the_run(here: Path) -> None:
    """Nothing was typed that could be typed again."""
    loaded = as_loaded({"model": "my model", "run": "my run"})
    words = "tunewell train --resume --config 'my run/config.yaml' --out 'my run'"
    assert resume_command(loaded) == words
