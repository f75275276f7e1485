"""`tunewell init`: the config it writes can be used as it is."""

import json
import re
import shlex

import pytest

from tunewell.cli.main import main
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.workflows.init import init, init_to_train
from tunewell.workflows.prepare import prepare


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _rows(path, number=30):
    lines = [json.dumps({"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}."}) for n in range(number)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_the_config_it_writes_loads_and_prepares(folder, tiny_model, capsys):
    """Guards against comments or quoting that break the YAML."""
    _rows(folder / "my rows: all #1.jsonl")
    init("my rows: all #1.jsonl", model=str(tiny_model))
    loaded = load_config()
    assert loaded.config.data.sources[0].path == "my rows: all #1.jsonl"
    assert loaded.config.train.learning_rate == 1e-3 or loaded.config.train.learning_rate == 2e-4
    assert main(["prepare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows_in"] == 30


def test_reasons_stand_beside_the_numbers(folder, tiny_model):
    """Guards the promise that a person can read why."""
    _rows(folder / "rows.jsonl")
    text = init("rows.jsonl", model=str(tiny_model)).text
    keys = ("kind:", "rank:", "alpha:", "epochs:", "learning_rate:", "schedule:", "warmup:", "batch_documents:")
    for key in (*keys, "held_out:", "context_length:"):
        line = next(line for line in text.splitlines() if line.strip().startswith(key))
        assert "#" in line, line


@pytest.mark.parametrize(
    ("method", "kind", "quantize", "optimizer", "share"),
    [
        ("lora", "lora", "none", "adamw", 1),
        ("qlora", "lora", "nf4", "adamw", 1),
        ("int8", "lora", "int8", "adamw", 1),
        ("dora", "dora", "none", "adamw", 1),
        ("full", "full", "none", "adamw", 0.1),
        ("adamw8bit", "full", "none", "adamw8bit", 0.1),
        ("galore", "full", "none", "galore", 1),
    ],
)
def test_each_method_has_a_first_rate_with_a_reason(folder, tiny_model, method, kind, quantize, optimizer, share):
    """Guards against LoRA's rate under full fine-tuning, which ruins a model."""
    _rows(folder / "rows.jsonl")
    plain = init("rows.jsonl", model=str(tiny_model)).settings["train.learning_rate"].value
    result = init("rows.jsonl", model=str(tiny_model), method=method, is_overwriting=True)
    config = load_config().config
    assert (config.method.kind, config.method.quantize, config.train.optimizer) == (kind, quantize, optimizer)
    assert config.train.learning_rate == result.settings["train.learning_rate"].value == pytest.approx(share * plain)
    assert ("rank:" in result.text) == (kind != "full")
    if kind == "full":
        assert "a tenth of LoRA's, because it changes every weight" in result.text
    assert ("times 10: GaLore's updates are smaller" in result.text) == (method == "galore")


def test_an_unknown_method_is_an_error(folder, tiny_model):
    _rows(folder / "rows.jsonl")
    with pytest.raises(UserError, match="unknown method `qlra`"):
        init("rows.jsonl", model=str(tiny_model), method="qlra")
    assert not (folder / "tunewell.yaml").exists()


def test_a_validation_file_beside_the_data_is_held_out(folder, tiny_model):
    """Guards against training on the file that people keep for validation."""
    _rows(folder / "train.jsonl")
    _rows(folder / "valid.jsonl", 3)
    assert init("train.jsonl", model=str(tiny_model)).held_out == "valid.jsonl"
    assert load_config().config.data.held_out == "valid.jsonl"


def test_a_config_that_is_there_is_not_replaced(folder, tiny_model):
    """Guards a config that someone has edited."""
    _rows(folder / "rows.jsonl")
    (folder / "tunewell.yaml").write_text("seed: 7\n", encoding="utf-8")
    with pytest.raises(UserError, match="already"):
        init("rows.jsonl", model=str(tiny_model))
    assert (folder / "tunewell.yaml").read_text(encoding="utf-8") == "seed: 7\n"
    init("rows.jsonl", model=str(tiny_model), is_overwriting=True)
    assert load_config().config.seed == 0


def test_a_model_without_a_template_gets_one_that_fits(folder, tiny_model, tmp_path_factory):
    """Guards base models: `auto` would leave them without any template."""
    bare = tmp_path_factory.mktemp("bare")
    for path in tiny_model.iterdir():
        if path.name == "tokenizer_config.json":
            config = json.loads(path.read_text(encoding="utf-8"))
            config.pop("chat_template", None)
            (bare / path.name).write_text(json.dumps(config), encoding="utf-8")
        elif path.suffix != ".jinja":
            (bare / path.name).write_bytes(path.read_bytes())
    _rows(folder / "rows.jsonl")
    assert init("rows.jsonl", model=str(bare)).template == "chatml"


def test_limits_and_counts_are_those_of_the_data(folder, tiny_model):
    """Guards the row count in the config, which epochs are chosen by."""
    _rows(folder / "rows.jsonl", 40)
    assert init("rows.jsonl", model=str(tiny_model)).num_rows == 40
    assert init("rows.jsonl#7", model=str(tiny_model), is_overwriting=True).num_rows == 7
    assert load_config().config.data.sources[0].limit == 7


def test_json_has_what_the_screen_has(folder, tiny_model, capsys):
    """Guards scripts that read `init --json`."""
    _rows(folder / "rows.jsonl")
    assert main(["init", "rows.jsonl", "--model", str(tiny_model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 30
    assert found["formats"] == ["question_answer"]
    assert (found["epochs"], found["batch_documents"], found["updates"]) == (10, 4, 80)


def test_a_classification_set_gets_its_format(folder, tiny_model, capsys):
    """Guards the label: a column `text` alone would be trained as plain text."""
    lines = [f"film {n} was {'great' if n % 2 else 'dull'},{'good' if n % 2 else 'bad'}" for n in range(40)]
    for name, first in (("a.csv", "text,label"), ("b.csv", "sentence,label")):
        (folder / name).write_text("\n".join([first, *lines]), encoding="utf-8")
        assert main(["init", f"{name}#30", "--model", str(tiny_model), "--force"]) == 0
        assert "2 labels" in capsys.readouterr().out
        source = load_config().config.data.sources[0]
        assert (source.path, source.format, source.limit) == (name, "classification", 30)
        assert main(["prepare", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["sources"][0]["formats"] == {"classification": 30}


def test_labels_that_are_numbers_are_written_where_their_names_belong(folder, tiny_model, capsys):
    """The numbers were ignored: the texts alone were trained on, with a note about an unused column."""
    lines = ["text,label", *(f"film {n} was so and so,{n % 2}" for n in range(40))]
    (folder / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    assert main(["init", "rows.csv", "--model", str(tiny_model)]) == 0
    assert "2 labels" in capsys.readouterr().out
    source = load_config().config.data.sources[0]
    assert (source.format, source.labels) == ("classification", ("0", "1"))
    config = (folder / "tunewell.yaml").read_text(encoding="utf-8")
    assert "replace them by their names" in config
    for labels in ("['0', '1']", "[dull, great]"):
        (folder / "tunewell.yaml").write_text(config.replace("['0', '1']", labels), encoding="utf-8")
        assert prepare(load_config()).manifest.dropped == {}


def test_texts_with_other_columns_stay_texts(folder, tiny_model, capsys):
    """Guards columns that are no labels."""
    (folder / "rows.csv").write_text("text,title\nsome words,b\nmore words,d\n", encoding="utf-8")
    assert main(["init", "rows.csv", "--model", str(tiny_model)]) == 0
    assert "used" in capsys.readouterr().out
    assert load_config().config.data.sources[0].format == "auto"


def test_column_names_that_nearly_match_are_set(folder, tiny_model):
    """Guards the first file of many people: `init` refused `Question,Answer` and named a config that did not exist."""
    lines = ["Question,Answer", *(f"what is {n}?,it is {n}" for n in range(9))]
    (folder / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    init("rows.csv#8", model=str(tiny_model))
    source = load_config().config.data.sources[0]
    assert (source.columns, source.limit) == ({"question": "Question", "answer": "Answer"}, 8)
    assert main(["prepare"]) == 0


@pytest.mark.parametrize(
    ("head", "columns"),
    [
        ("Frage;Antwort;Datum", {"question": "Frage", "answer": "Antwort"}),
        ("Datum;Réponse;Question", {"question": "Question", "answer": "Réponse"}),
        ("質問;回答;id", {"question": "質問", "answer": "回答"}),
        ("Вопрос;Ответ;id", {"question": "Вопрос", "answer": "Ответ"}),
    ],
)
def test_headings_in_other_languages_are_known(folder, tiny_model, head, columns):
    """Guards the circle in which `init` named `inspect`, which repeated the error, and no config was written."""
    values = ["wo ist Nummer {0}?", "es ist dort, bei {0}", "2024"]
    order = [*columns.values()]
    rows = [
        ";".join(values[order.index(name) if name in order else 2] for name in head.split(";")).format(n)
        for n in range(9)
    ]
    (folder / "rows.csv").write_text("\n".join([head, *rows]), encoding="utf-8")
    assert init("rows.csv", model=str(tiny_model)).source.open_points == {}
    assert load_config().config.data.sources[0].columns == columns
    assert main(["prepare"]) == 0


def test_what_nobody_decided_is_open_in_the_config(folder, tiny_model, capfd):
    """Guards a config with a guess in it that looks like a decision, and an error without a config."""
    (folder / "rows.csv").write_text(
        "a1,b1,n\n" + "".join(f"wo {n}?,dort {n},{n}\n" for n in range(9)), encoding="utf-8"
    )
    assert main(["init", "rows.csv", "--model", str(tiny_model)]) == 2
    shown = " ".join(capfd.readouterr().out.split())
    assert "1 open point" in shown and '--force --columns "question=a1,answer=b1"`' in shown
    assert load_config().config.data.sources[0].columns == {"question": "?", "answer": "?"}
    for command in ("prepare", "train", "plan", "inspect"):
        assert main([command]) == 2
        error = capfd.readouterr().err
        assert "importing" not in error
        assert "open point: `data.sources[0].columns`" in error and "tunewell.yaml line 10" in error, error
    arguments = ["init", "rows.csv", "--model", str(tiny_model), "--force", "--columns", "question=a1,answer=b1"]
    assert main(arguments) == 0
    assert main(["prepare"]) == 0


def test_a_column_that_does_not_exist_is_an_error(folder, tiny_model, capsys):
    _rows(folder / "rows.jsonl")
    assert main(["init", "rows.jsonl", "--model", str(tiny_model), "--columns", "question=Frage"]) == 2
    assert "the columns are question, answer" in capsys.readouterr().err
    assert main(["init", "rows.jsonl", "--model", str(tiny_model), "--columns", "Frage,Antwort"]) == 2
    assert "--columns question=Frage,answer=Antwort" in capsys.readouterr().err


def test_settings_on_the_command_line_are_written_to_the_config(folder, tiny_model):
    """Guards `init --set`: the value is in the file, and its comment does not give another reason."""
    (folder / "rows.csv").write_bytes(
        b"question,answer\n" + "".join(f"wie {n}?,schön {n}\n" for n in range(9)).encode("cp1250")
    )
    sets = ["train.epochs=2", "data.clean.secrets=redact", "lr=3e-5", "data.sources[0].system=Be brief."]
    arguments = [word for text in sets for word in ("--set", text)]
    assert main(["init", "rows.csv", "--model", str(tiny_model), "--encoding", "cp1250", *arguments]) == 0
    config = load_config().config
    assert (config.train.epochs, config.train.learning_rate, config.data.clean.secrets) == (2, 3e-5, "redact")
    assert (config.data.sources[0].encoding, config.data.sources[0].system) == ("cp1250", "Be brief.")
    assert "epochs: 2   # as you said" in (folder / "tunewell.yaml").read_text(encoding="utf-8")
    assert main(["prepare"]) == 0


def test_a_chat_asks_whose_messages_are_the_replies(folder, tiny_model, capsys):
    """Guards a chat between people, in which either could be the one to imitate."""
    turns = [
        f"[0{day}/02/2024, 10:{minute}:32] {who}: Hi {day}\n"
        for day in range(1, 10)
        for minute, who in ((15, "Ann"), (16, "Bob"), (17, "Ann"))
    ]
    (folder / "_chat.txt").write_text("".join(turns), encoding="utf-8")
    assert main(["init", "_chat.txt", "--model", str(tiny_model)]) == 2
    assert "data.sources[0].assistant=Ann" in capsys.readouterr().out
    asked = []
    init("_chat.txt", model=str(tiny_model), is_overwriting=True, ask=lambda question: asked.append(question) or "Bob")
    assert [value for value, _ in asked[0].options] == ["Ann", "Bob"]
    assert load_config().config.data.sources[0].assistant == "Bob"
    assert main(["prepare"]) == 0


def test_two_possible_separators_are_asked_for(folder, tiny_model):
    """Guards a table that can be read in two ways, of which one cuts the answers."""
    lines = ["question;more, answer", *(f"who {n}?;he, she {n}" for n in range(9))]
    (folder / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    chosen = {"What separates": ";", "Which column of": "question", "Which column is": "more, answer"}

    def answer(question):
        return next(value for start, value in chosen.items() if question.text.startswith(start))

    init("rows.csv", model=str(tiny_model), ask=answer)
    source = load_config().config.data.sources[0]
    assert (source.separator, source.columns) == (";", {"question": "question", "answer": "more, answer"})
    assert main(["prepare"]) == 0


def test_an_unknown_encoding_stays_open_until_somebody_reads_the_letters(folder, tiny_model):
    """Guards letters that are wrong in every row: bytes of Shift-JIS have no meaning in cp1252."""
    rows = "question,answer\n" + "".join(f"これは何ですか {n},答えは {n} です\n" for n in range(9))
    (folder / "rows.csv").write_bytes(rows.encode("shift_jis"))
    assert "shift_jis" in init("rows.csv", model=str(tiny_model)).source.open_points["encoding"]
    with pytest.raises(UserError, match="open point"):
        prepare(load_config())
    seen = []
    init(
        "rows.csv",
        model=str(tiny_model),
        is_overwriting=True,
        ask=lambda question: seen.append(question) or "shift_jis",
    )
    assert any("これは何ですか" in text for value, text in seen[0].options if value == "shift_jis")
    assert prepare(load_config()).manifest.dropped == {}


def test_plain_text_gets_a_config_without_a_template(folder, tiny_model, capsys):
    """Guards against `learn_from: responses` for texts, which have no responses and are supervised as a whole."""
    (folder / "notes.txt").write_text("".join(f"Paragraph {n} of a text.\n\n" for n in range(12)), encoding="utf-8")
    assert main(["init", "notes.txt", "--model", str(tiny_model)]) == 0
    assert "not used for plain text" in capsys.readouterr().out
    assert "template:" not in (folder / "tunewell.yaml").read_text(encoding="utf-8")
    assert main(["prepare"]) == 0
    assert "chat template: not used for plain text" in " ".join(capsys.readouterr().out.split())


def test_paths_are_relative_to_the_folder_of_the_config(folder, tiny_model, monkeypatch):
    """Guards `--out` in another folder: the config was written with paths that it could not find."""
    (folder / "data").mkdir()
    _rows(folder / "data" / "rows.jsonl")
    _rows(folder / "data" / "valid.jsonl", 3)
    (folder / "model").symlink_to(tiny_model)
    init("data/rows.jsonl", model="model", out=folder / "configs" / "first.yaml")
    monkeypatch.chdir(folder / "configs")
    assert main(["prepare", "--config", "first.yaml"]) == 0
    loaded = load_config(folder / "configs" / "first.yaml")
    assert (loaded.config.data.held_out, loaded.config.model) == ("../data/valid.jsonl", "../model")


@pytest.mark.parametrize(
    ("sender", "columns"),
    [("O'Brien", ("Prompt, Teil 1", "Text $HOME")), ("123", ("A=B", 'x"y')), ("[Bob]", ("a 1", "b 1"))],
)
def test_the_command_that_decides_works_as_pasted(folder, tiny_model, capsys, sender, columns):
    """Names with quotes, commas or `$`, or like numbers, made a command that a shell or `--set` read otherwise."""
    said = [(day, who) for day in range(1, 10) for who in (sender, "Ann", sender)]
    turns = [f"[0{day}/02/2024, 10:15:32] {who}: Hi {day}\n" for day, who in said]
    (folder / "_chat.txt").write_text("".join(turns), encoding="utf-8")
    rows = "".join(f"where is thing number {n}?;it is over there {n};x\n" for n in range(9))
    quoted = ";".join('"' + name.replace('"', '""') + '"' for name in columns)
    (folder / "rows.csv").write_text(f"{quoted};n\n{rows}", encoding="utf-8")
    found = []
    for name in ("_chat.txt", "rows.csv"):
        given = ["--model", str(tiny_model), "--method", "dora", "--set", "seed=5", "--encoding", "utf-8", "--force"]
        assert main(["init", name, *given]) == 2
        command = re.search(r"for example: `(tunewell .*)`$", " ".join(capsys.readouterr().out.split()))
        assert command is not None
        assert main(shlex.split(command[1])[1:]) == 0
        found.append(load_config().config)
        assert (found[-1].seed, found[-1].method.kind, found[-1].data.sources[0].encoding) == (5, "dora", "utf-8")
    assert found[0].data.sources[0].assistant == sender
    assert found[1].data.sources[0].columns == dict(zip(("question", "answer"), columns, strict=True))


def test_a_limit_that_is_set_is_kept(folder, tiny_model):
    """`--set data.sources[0].limit=5` was ignored without a word."""
    _rows(folder / "rows.jsonl")
    assert init("rows.jsonl", model=str(tiny_model), sets=["data.sources[0].limit=5"]).num_rows == 5
    assert load_config().config.data.sources[0].limit == 5


@pytest.mark.parametrize(("first", "fix"), [(0, "labels=[negative, positive]"), (1, 'labels=["1", "2"]')])
def test_labels_that_are_numbers_get_a_command_that_works(folder, tiny_model, capsys, first, fix):
    """Names were asked for without the option, and ratings from 1 on could not be given names at all."""
    rows = "".join(f"film {n} was so and so,{first + n % 2}\n" for n in range(20))
    (folder / "rows.csv").write_text("text,label\n" + rows, encoding="utf-8")
    arguments = ["init", "rows.csv", "--model", str(tiny_model), "--set", "data.sources[0].format=classification"]
    assert main(arguments) == 2
    option = re.search(r"add `(--set [^`]*)`", capsys.readouterr().err)
    assert option is not None and fix in option[1]
    assert main([*arguments, *shlex.split(option[1])]) == 0
    assert prepare(load_config()).manifest.dropped == {}


def test_rows_of_the_config_are_recognised_however_they_are_written(folder, tiny_model):
    """`train ./rows.jsonl` was refused as other rows, and `train rows.jsonl#5` trained on all rows."""
    _rows(folder / "rows.jsonl")
    sets = ["data.sources[0].system=Be brief."]
    assert init_to_train("rows.jsonl", model=str(tiny_model), sets=sets) is not None
    assert load_config().config.data.sources[0].system == "Be brief."
    for same in ("./rows.jsonl", str(folder / "rows.jsonl")):
        assert init_to_train(same, model=str(tiny_model)) is None
    for other in ("rows.jsonl#5", "others.jsonl"):
        with pytest.raises(UserError, match="other rows"):
            init_to_train(other, model=str(tiny_model))


def test_rows_that_the_model_cannot_read_are_a_warning_outside_a_terminal(folder, tiny_model, capsys):
    """Guards against a config that stops `train` without a word."""
    _rows(folder / "rows.jsonl")
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"question": "Why?", "answer": "because " * 5_000}) + "\n")
    line = ["init", "rows.jsonl", "--model", str(tiny_model), "--force", "--set", "packing.context_length=256"]
    assert main(line) == 0
    assert "packing.long_documents=split" in " ".join(capsys.readouterr().out.split())
    assert main([*line, "--set", "packing.long_documents=drop"]) == 0
    assert "`train` will stop" not in " ".join(capsys.readouterr().out.split())
