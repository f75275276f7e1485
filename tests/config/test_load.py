"""Loading a config: precedence, origins, other tools' names, and every mistake told with its line."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tunewell.config.load import LoadedConfig, load_config, to_loaded_config
from tunewell.config.schema import Config
from tunewell.core.errors import UserError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(text: str, *sets: str, **flags) -> LoadedConfig:
    Path("tunewell.yaml").write_text(text, encoding="utf-8")
    return load_config(None, sets, **flags)


def refusal(text: str, *sets: str) -> str:
    with pytest.raises(UserError) as caught:
        load(text, *sets)
    return str(caught.value)


def test_without_a_file_everything_is_the_default():
    """`tunewell prepare --data x` must work in an empty folder."""
    loaded = load_config()
    assert loaded.config == Config() and loaded.file is None and loaded.base == Path()
    assert loaded.origin("packing.context_length") == "default"


def test_a_mapping_is_read_as_a_file_would_be():
    """A notebook has its settings in a dictionary; other tools' names, short sources and paths are the same there."""
    Path("tunewell.yaml").write_text("seed: 99\n")
    given = {
        "model": Path("base"),
        "data": {"sources": ("rows.jsonl#5", {"path": "more.jsonl"})},
        "max_seq_length": 512,
        "method": None,
        "train": {"epochs": 2},
    }
    text = (
        "model: base\ndata:\n  sources: ['rows.jsonl#5', {path: more.jsonl}]\nmax_seq_length: 512\ntrain: {epochs: 2}\n"
    )
    loaded = to_loaded_config(given, ["train.epochs=1"], model="other")
    assert loaded.config == load(text, "train.epochs=1", model="other").config
    assert to_loaded_config(given, "train.epochs=1", model="other").config == loaded.config
    assert loaded.file is None and loaded.base == Path() and given["train"] == {"epochs": 2}
    assert loaded.origin("packing.context_length") == "the config" and loaded.origin("model") == "--model"
    assert to_loaded_config({}).config == Config()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train": {"epoch": 2}}, "unknown key `train.epoch`"),
        ({"train": {"epochs": "2"}}, "`train.epochs` must be"),
        ({"train": 5}, "`train` is a section"),
        ({"max_length": 5, "cutoff_len": 5}, "are the same key"),
        ({1: 2}, "the key 1 is not text"),
        ({"train": {None: 2}}, "the key None is not text"),
        (["model"], "a config is a file or a mapping, not list"),
        (5, "not int"),
        ({"train.epochs": 2}, "write `epochs` inside `train`"),
    ],
)
def test_a_mapping_that_cannot_be_read_is_refused_in_words(given, words):
    """A TypeError from deep inside says nothing about which key it was."""
    with pytest.raises(UserError) as caught:
        to_loaded_config(given)
    assert words in str(caught.value)


def test_a_mapping_that_holds_itself_is_refused():
    given: dict[str, Any] = {"train": {}}
    given["train"]["again"] = given
    with pytest.raises(UserError, match="nested more than 32 deep"):
        to_loaded_config(given)


def test_the_defaults_are_what_the_pages_promise():
    """A default that changes must change here too, on purpose."""
    config = Config()
    assert (config.packing.context_length, config.packing.long_documents) == ("auto", "error")
    assert (config.data.held_out, config.data.max_repeats, config.data.clean.max_row_bytes) == ("auto", 4, 4 << 20)
    assert (config.method.kind, config.method.rank, config.method.alpha) == ("lora", "auto", "auto")
    assert (config.train.epochs, config.train.learning_rate) == ("auto", "auto")
    assert (config.template.name, config.template.learn_from, config.template.date) == (
        "auto",
        "responses",
        "2025-01-01",
    )


def test_a_config_cannot_be_changed():
    """Configuration that changes after it was read is how runs stop being repeatable."""
    with pytest.raises(ValidationError):
        Config().packing.context_length = 5  # type: ignore[misc]


def test_set_wins_over_flags_and_flags_over_the_file():
    """The nearer to the person's fingers, the stronger."""
    loaded = load("model: a\nseed: 1\ncorpus: c\n", "model=c", model="b", seed=2)
    assert (loaded.config.model, loaded.config.seed, loaded.config.corpus) == ("c", 2, "c")
    assert loaded.origin("model") == "--set model=c"
    assert loaded.origin("seed") == "--seed"
    assert loaded.origin("corpus") == "tunewell.yaml line 3"


def test_of_two_sets_the_later_counts():
    """As everywhere on a command line."""
    assert load("", "seed=1", "seed=2").config.seed == 2


@pytest.mark.parametrize("name", ["7", "007", "1.5", "2026", "1e3"])
def test_a_folder_may_be_a_number_on_the_command_line(name):
    """`prepare --out 2026` suggested `train --set corpus=2026`, which was refused. No zero may get lost."""
    config = load("", f"run={name}", f"corpus={name}", f"model={name}").config
    assert (config.run, config.corpus, config.model) == (name, name, name)
    assert load("", "model=null").config.model is None
    with pytest.raises(UserError, match="`run` must be text"):
        load("", "run=true")


def test_set_reaches_every_place():
    """`--set` is the way to every key, also inside a list, also with the names of other tools."""
    text = "data:\n  sources: a.jsonl#500\n"
    sets = [
        "data.sources[0].share=1.0",
        "max_length=512",
        "train.lr=1e-4",
        "template.arguments={enable_thinking: false}",
    ]
    loaded = load(text, *sets, "template.arguments.depth=2", "data.clean.drop_urls=true")
    (source,) = loaded.config.data.sources
    assert (source.path, source.limit, source.share) == ("a.jsonl", 500, 1.0)
    assert loaded.config.packing.context_length == 512
    assert loaded.config.train.learning_rate == 1e-4
    assert loaded.config.template.arguments == {"enable_thinking": False, "depth": 2}
    assert loaded.config.data.clean.drop_urls is True
    assert loaded.origin("data.sources[0].path") == "tunewell.yaml line 2"
    assert loaded.origin("data.sources[0].share") == "--set data.sources[0].share=1.0"


def test_set_can_give_a_whole_list():
    """The list on the command line replaces the one in the file."""
    loaded = load("data: {sources: [x, y, z]}", "data.sources=[a.jsonl, b.jsonl#2]", "data.sources[1].format=alpaca")
    assert [(s.path, s.limit, s.format) for s in loaded.config.data.sources] == [
        ("a.jsonl", None, "auto"),
        ("b.jsonl", 2, "alpaca"),
    ]
    assert loaded.origin("data.sources[0].path") == "--set data.sources=[a.jsonl, b.jsonl#2]"


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("sources: a.jsonl", [("a.jsonl", None)]),
        ("sources: {path: a#5}", [("a#5", None)]),
        ("sources: [a.jsonl#500, {path: b, limit: 3}]", [("a.jsonl", 500), ("b", 3)]),
        ("sources: ['a#b.jsonl']", [("a#b.jsonl", None)]),
    ],
)
def test_sources_have_short_forms(text, paths):
    """One path is the common case; a file whose name ends in `#5` is named in the long form."""
    assert [(s.path, s.limit) for s in load(f"data:\n  {text}\n").config.data.sources] == paths


@pytest.mark.parametrize("alias", ["max_length", "max_seq_length", "sequence_len", "cutoff_len"])
@pytest.mark.parametrize("form", ["{}: 512\n", "packing:\n  {}: 512\n"])
def test_four_names_for_one_thing_are_stored_as_one(alias, form):
    """People bring their configs from four other tools."""
    loaded = load(form.format(alias))
    assert loaded.config.packing.context_length == 512
    assert loaded.origin("packing.context_length").startswith("tunewell.yaml line")


def test_other_tools_names_are_read_beside_our_own():
    """A branch may hold our keys and an alias at once."""
    config = load(
        "base_model: m\nlr: 1e-5\nnum_train_epochs: 2\nlora_r: 8\nmethod: {lora_alpha: 4, kind: full}\n"
    ).config
    assert (config.model, config.train.learning_rate, config.train.epochs) == ("m", 1e-5, 2.0)
    assert (config.method.rank, config.method.alpha, config.method.kind) == (8, 4, "full")


def test_two_names_for_one_key_are_refused_with_both():
    """Which of the two counts must not be a matter of luck."""
    said = refusal("max_length: 1024\npacking:\n  context_length: 512\n")
    names = "`packing.context_length` (tunewell.yaml line 3) and `max_length` (tunewell.yaml line 1)"
    assert f"{names} are the same key" in said


def test_groups_left_empty_are_defaults():
    """`packing:` with all its keys commented out is null in YAML."""
    assert (
        load(
            "packing:\n  # context_length: 5\ndata:\n  clean:\n", "packing.context_length=8"
        ).config.packing.context_length
        == 8
    )
    assert load("").config == Config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "packing:\n  contxt_length: 5\n",
            "`packing.contxt_length`\n  where: tunewell.yaml line 2\n  fix:   did you mean `packing.con",
        ),
        ("context_length: 5\n", "did you mean `packing.context_length`?"),
        ("pakcing: {}\n", "did you mean `packing`?"),
        ("zzz: 1\n", "`tunewell explain` lists every key"),
        ("data: {sources: [{path: a, shares: 1}]}\n", "did you mean `data.sources.share`?"),
        ("data: {sources: [{limit: 1}]}\n", "`data.sources[0].path` is missing"),
        ("data: 5\n", "`data` is a section, not 5"),
        ("data: [{limit: 1}]\n", "`data.sources[0].path` is missing\n  where: tunewell.yaml line 1"),
        (
            "packing: {context_length: '512'}\n",
            "line 1\n  fix:   remove the quotes",
        ),
        (
            "packing: {context_length: true}\n",
            "must be a whole number (at least 2 and at most 16,777,216), or `auto`, not true",
        ),
        ("packing: {context_length: 1.5}\n", "not 1.5"),
        ("packing: {context_length: 0}\n", "at least 2"),
        ("data: {clean: {drop_urls: yes}}\n", "must be `true` or `false`, not 'yes'"),
        ("data: {clean: {drop_urls: 1}}\n", "must be `true` or `false`, not 1"),
        ("data: {held_out: 0.5}\n", "below 0.5"),
        ("data: {held_out: -0.1}\n", "at least 0"),
        ("data: {held_out: 5%}\n", "a number like 0.05"),
        ("data: {held_out: '0.1'}\n", "a number like 0.05"),
        ("method: {rank: 0}\n", "at least 1"),
        ("train: {learning_rate: .inf}\n", "not inf"),
        ("train: {epochs: 0}\n", "above 0"),
        ("seed: -1\n", "at least 0"),
        ("seed:\n", "not empty"),
        ("model: 5\n", "must be text, or `null`, not 5"),
        ("template: {date: tomorrow}\n", "must be a date like 2025-01-31"),
        ("data: {sources: [{path: a, encoding: utf-99}]}\n", "an encoding of Python"),
        ("data: {sources: [{path: a, map: convert}]}\n", "like `rows.py:convert`"),
        ("data: {sources: [{path: a, map_batch: 5}]}\n", "`map_batch` but no `map`"),
        ("data: {sources: 'a.jsonl#0'}\n", "`data.sources[0].limit` must be a whole number (at least 1)"),
        ("data: {sources: [{path: a, share: 0.8}, {path: b, share: 0.4}]}\n", "add up to 1.2"),
        ("data: {sources: [{path: a, share: 0.5}, {path: b, share: 0.4}]}\n", "add up to 0.9"),
        ("data: {sources: [{path: a, share: 1.0}, b]}\n", "nothing is left for them"),
        ("- a\n- b\n", "the config has no keys"),
        ("seed: 1\nseed: 2\n", "`seed` is set twice, in lines 1 and 2"),
        ("a: [\n", "invalid YAML"),
        ('{"a": 1, // one\n"b": 2}\n', "line 2\n  fix:   put commas between the entries; a comment begins with `#`"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_its_fix(text, said):
    """Each of these is a night lost when it is read as something else."""
    assert said in refusal(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("seed", "has no value"),
        ("seed=x", "`seed` must be a whole number"),
        ("trian.seed=1", "unknown key `trian`\n  where: --set trian.seed=1\n  fix:   did you mean `train`?"),
        ("sed=1", "unknown key `sed`\n  where: --set sed=1\n  fix:   did you mean `seed`?"),
        ("seed.x=1", "`seed` has no key `x`"),
        ("data.sources.shar=0.5", "unknown key `data.sources[0].shar`"),
        ("data.sources[1].share=0.5", "has 1 entry, counted from 0"),
        ("a b=1", "`a b` is not a key"),
        ("=1", "`` is not a key"),
        ("packing={context_length: 5, x: 1}", "unknown key `packing.x`"),
        ("template.arguments=[1", "invalid YAML"),
    ],
)
def test_a_mistake_on_the_command_line_names_the_option(given, said):
    """A mistake in `--set` must not be blamed on the file."""
    assert said in refusal("seed: 1\ndata: {sources: a.jsonl}\n", given)


def test_the_only_source_needs_no_number():
    """`explain` prints `data.sources.gap_hours`, and `--set` with this name was refused."""
    one = load_config({"data": {"sources": "a.txt"}}, ["data.sources.gap_hours=12"])
    assert one.config.data.sources[0].gap_hours == 12
    assert one.origins["data.sources[0].gap_hours"] == "--set data.sources.gap_hours=12"
    with pytest.raises(UserError, match="is a list"):
        load_config({"data": {"sources": ["a.txt", "b.txt"]}}, ["data.sources.gap_hours=12"])


def test_all_mistakes_of_a_file_are_told_together_in_its_order():
    """Mending one to be told of the next is how an evening goes."""
    lines = [
        "seed: x",
        "modl: a",
        "corpus: 5",
        "packing: {long_documents: cut}",
        "train: {epochs: a}",
        "method: {rank: 0}",
        "xyz: 1",
    ]
    said = refusal("\n".join(lines))
    assert said.startswith("7 problems in the config\n")
    told = [line.split(":")[0].strip() for line in said.splitlines()[1:8]]
    assert told == [f"tunewell.yaml line {number}" for number in range(1, 8)]


def test_paths_start_from_the_configs_folder(tmp_path):
    """`--config exp/tunewell.yaml` must find the data beside it; what is typed is meant from here."""
    folder = tmp_path / "exp"
    folder.mkdir()
    (folder / "tunewell.yaml").write_text("data: {sources: rows.jsonl}\ncorpus: made\n")
    Path("tokenizer").mkdir()
    loaded = load_config(Path("exp/tunewell.yaml"))
    assert loaded.base == Path("exp")
    assert loaded.path(loaded.config.data.sources[0].path) == Path("exp/rows.jsonl")
    typed = load_config(
        Path("exp/tunewell.yaml"),
        ["data.held_out=h.jsonl", "data.sources[0].map=m.py:f"],
        data=["a/*.jsonl#5"],
        out="c",
        model="tokenizer",
    )
    source = typed.config.data.sources[0]
    assert (source.path, source.limit, source.map) == (str(Path("../a/*.jsonl")), 5, str(Path("../m.py:f")))
    assert (typed.config.corpus, typed.config.model) == (str(Path("../c")), str(Path("../tokenizer")))
    assert typed.config.data.held_out == str(Path("../h.jsonl"))
    assert load_config(Path("exp/tunewell.yaml"), model="org/hub-name").config.model == "org/hub-name"
    assert load_config(Path("exp/tunewell.yaml"), model="m.gguf").config.model == str(Path("../m.gguf"))
    assert loaded.path("~/rows.jsonl") == Path.home() / "rows.jsonl"
    assert load_config(Path("exp/tunewell.yaml"), ["data.held_out=0.1"]).config.data.held_out == 0.1


def test_a_config_that_is_not_there_is_said_so(tmp_path):
    """Silence would mean training with defaults."""
    with pytest.raises(UserError, match="does not exist"):
        load_config(Path("nowhere.yaml"))
    with pytest.raises(UserError, match="is a folder"):
        load_config(tmp_path)
    Path("tunewell.yml").write_text("seed: 1\n")
    with pytest.raises(UserError, match="but no `tunewell"):
        load_config()


def test_a_file_in_another_encoding_is_refused_with_its_line():
    """Notepad writes UTF-16 and BOMs; the BOM is harmless."""
    Path("tunewell.yaml").write_bytes("seed: 7\n".encode("utf-8-sig"))
    assert load_config().config.seed == 7
    Path("tunewell.yaml").write_bytes(b"seed: 7\nmodel: caf\xe9\n")
    with pytest.raises(UserError, match="not UTF-8") as caught:
        load_config()
    assert caught.value.where == "tunewell.yaml line 2"


def test_a_file_far_too_large_is_refused_before_it_is_read():
    """`--config rows.jsonl` is a slip of the fingers, not a gigabyte of YAML."""
    Path("tunewell.yaml").write_text("é" * 600_000, encoding="utf-8")
    with pytest.raises(UserError, match="over 1,000,000 bytes"):
        load_config()


def test_loading_reads_no_environment(monkeypatch):
    """Variables that change results make runs that cannot be repeated."""
    for name in ("SEED", "TUNEWELL_SEED", "MODEL", "TUNEWELL_MODEL"):
        monkeypatch.setenv(name, "5")
    assert load("").config == Config()


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("data: rows.csv", [("rows.csv", None)]),
        ("data: [a.csv, b.jsonl#2]", [("a.csv", None), ("b.jsonl", 2)]),
        ("data:\n- path: a.csv\n  limit: 3", [("a.csv", 3)]),
    ],
)
def test_data_may_be_its_sources(text, paths):
    """`data: rows.csv` was an error, though `--data rows.csv` and `data.sources: rows.csv` work."""
    loaded = load(text + "\n")
    assert [(source.path, source.limit) for source in loaded.config.data.sources] == paths
    assert loaded.origin("data.sources[0].path").startswith("tunewell.yaml line ")
    assert load(text + "\n", "data.held_out=0.1").config.data.held_out == 0.1
    (source,) = load_config(Path("tunewell.yaml"), data="other.csv").config.data.sources
    assert source.path == "other.csv"
    loaded = load("data: {sources: x, held_out: 0.2}\n", f"data={[path for path, _ in paths]}")
    assert [source.path for source in loaded.config.data.sources] == [path for path, _ in paths]
    assert loaded.config.data.held_out == 0.2
    assert load_config({"data": Path("rows.csv")}).config.data.sources[0].path == "rows.csv"


@pytest.mark.parametrize(("value", "mode"), [("true", "on"), ("off", "off"), ("unsloth", "offload")])
def test_other_tools_values_of_gradient_checkpointing_are_accepted(value: str, mode: str) -> None:
    assert load_config(None, [f"train.gradient_checkpointing={value}"], has_file=False).config.train.recompute == mode
