"""The command that goes on with a run can be pasted where the first one was given."""

import shlex
from pathlib import Path

import pytest

from tunewell.config.load import Loaded, as_loaded, load_config
from tunewell.core.errors import UserError
from tunewell.core.redact import redact
from tunewell.runs.config import config_of_run, load_for_run, resume_command


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


def _began(loaded: Loaded) -> None:
    """Leave behind what a run does."""
    run = loaded.path(loaded.config.run)
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(redact(config_of_run(loaded)))


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
    Path("tunewell.yaml").unlink()
    typed = load_config(None, ['run="my run"'], model="my model", data="my rows.jsonl#5", seed=7)
    _began(typed)
    assert resume_command(typed) == "tunewell train --resume --out 'my run'"
    own = load_for_run(None, ['run="my run"'], is_resuming=True)
    assert own.config.model_dump() == typed.config.model_dump() and own.base == typed.base
    assert resume_command(own) == resume_command(typed)
    assert load_for_run(None, ['run="my run"'], is_resuming=False).config.model is None
    more = load_for_run(None, ['run="my run"', "data.sources[0].limit=4"], is_resuming=True)
    assert more.config.data.sources[0].limit == 4
    _began(load_config(None, model="my model", data="my rows.jsonl"))
    assert load_for_run("", is_resuming=True).config.model == "my model"


@pytest.mark.parametrize("link", ["run", "scratch"])
def test_a_run_behind_a_link_finds_what_it_was_given(here: Path, link: str) -> None:
    """The way up from a link is not the way that was come."""
    Path("tunewell.yaml").unlink()
    (here / "disk" / "far" / "off").mkdir(parents=True)
    Path(link).symlink_to(here / "disk" / "far" / "off")
    run = "run" if link == "run" else "scratch/run"
    typed = load_config(None, [f"run={run}"], model="my model", data="my rows.jsonl")
    _began(typed)
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
    _began(hidden)
    assert resume_command(hidden) == f"tunewell train --resume --model {secret} --data 'my rows.jsonl'"
    with pytest.raises(UserError, match="secret was taken out"):
        load_for_run(None, is_resuming=True)
    plain = load_config(model="my model", data="my rows.jsonl")
    _began(plain)
    assert resume_command(plain) == "tunewell train --resume"
    changed = load_config(None, ["train.epochs=9"], model="my model", data="my rows.jsonl")
    assert resume_command(changed).endswith("--set train.epochs=9")
    Path("tunewell.yml").write_text("seed: 1\n")
    assert resume_command(plain) == "tunewell train --resume --model 'my model' --data 'my rows.jsonl'"


@pytest.mark.parametrize("text", ["1e5", "0o17", "0x1F", "12:30:45", "~", "null", "yes", "2025-01-01", ".inf", ""])
def test_text_that_looks_like_something_else_stays_text_in_the_run(here: Path, text: str) -> None:
    typed = load_config({"model": "my model", "data": {"sources": [{"path": "my rows.jsonl", "system": text}]}})
    _began(typed)
    assert load_config(Path("run/config.yaml")).config.data.sources[0].system == text


def test_what_a_program_handed_over_is_taken_from_the_run(here: Path) -> None:
    """Nothing was typed that could be typed again."""
    loaded = as_loaded({"model": "my model", "run": "my run"})
    words = "tunewell train --resume --config 'my run/config.yaml' --out 'my run'"
    assert resume_command(loaded) == words
