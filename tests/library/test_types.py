"""The types of the library: a type checker finds a misspelt argument, and the library has the options of commands."""

import inspect
import json
import subprocess
import sys
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest

import tunewell
from tunewell.core.features import modules
from tunewell.evaluation.session import ValidateOptions
from tunewell.export.options import ExportOptions

ROOT = Path(__file__).parents[2]
SCRIPT = """import tunewell


def listen(event: tunewell.Event) -> None:
    if isinstance(event, tunewell.StepTaken):
        print(event.step, event.loss)


rows = [{"question": "1 and 1?", "answer": "2"}]
result = tunewell.train(model="base", data=rows, settings={"train.epochs": 1}, progress=listen)
if result.validation is not None:
    print(result.validation.verdict)
plan: tunewell.PlanResult = tunewell.plan("tunewell.yaml", gpus=["t4"])
checked = tunewell.validate(result, data="more.jsonl", metrics={"exact": lambda _, answer, given: answer == given})
made = tunewell.export(result, to="gguf", gguf="q8_0")
print(checked.verdict, made.folder, made.is_proven)
model = tunewell.load(result)
print(model.chat([{"role": "user", "content": "Hello"}]).upper(), model.generate(["a", "b"])[0].upper())
for text in model.stream("And 2 and 2?"):
    print(text.upper(), end="")
print(tunewell.sweep(over={"train.learning_rate": [1e-4, 3e-4]}, data=rows, settings={"seed": 1}).best)
print(tunewell.compare(result, "base", index="index", num_questions=20).recommendation)
print(tunewell.ask("Why?").answer)
"""
MISTAKES = {
    'tunewell.validate("run", chekpoint=3)': 'No parameter named "chekpoint"',
    'tunewell.export("run", presicion="bf16")': 'No parameter named "presicion"',
    'tunewell.compare("run", question=4)': 'No parameter named "question"',
    'tunewell.sweep(over={}, setings={"seed": 1})': 'No parameter named "setings"',
    "tunewell.train(data=42)": '"Literal[42]" cannot be assigned to parameter "data"',
    "tunewell.StepTaken.learning": 'Cannot access attribute "learning"',
}


@pytest.mark.slow  # pyright reads torch and transformers
def test_pyright_finds_a_misspelt_argument_in_the_script_of_a_user_and_nothing_else(tmp_path: Path) -> None:
    """With `**options`, a misspelt option was found after the model was loaded, by an error of another function."""
    mistakes = {line: message for line, message in MISTAKES.items() if _is_available(line)}
    lines = [line for line in SCRIPT.splitlines() if _is_available(line)]
    script = "\n".join([*lines, *mistakes])
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    settings = {"include": ["script.py"], "typeCheckingMode": "strict", "extraPaths": [str(ROOT / "src")]}
    venv = {"venvPath": str(ROOT), "venv": ".venv", "reportUnusedExpression": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings | venv), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--project", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {one["range"]["start"]["line"]: one["message"] for one in json.loads(done.stdout)["generalDiagnostics"]}
    assert [*found] == [len(lines) + number for number in range(len(mistakes))], found
    for message, expected in zip(found.values(), mistakes.values(), strict=True):
        assert expected in message


def _is_available(line: str) -> bool:
    """Return False for a line with a function of a feature that this installation does not have."""
    missing = {"sweep", "compare", "ask"} - {*modules("functions")}
    return not any(f"tunewell.{name}(" in line for name in missing)


def test_the_wheel_says_that_the_package_is_typed() -> None:
    """Without `py.typed`, type checkers ignore every annotation of an installed package."""
    assert (files("tunewell") / "py.typed").is_file()


@pytest.mark.parametrize(
    ("function", "options", "others"),
    [
        (tunewell.validate, ValidateOptions, {"corpus"}),
        (tunewell.export, ExportOptions, set()),
    ],
)
def test_the_library_has_every_option_of_the_command_and_its_default(function, options, others: set[str]) -> None:
    """A new option of a command that the library lacks would only be found by a user."""
    parameters = inspect.signature(function).parameters
    names = {field.name for field in fields(options)} - others
    assert {*parameters} == names | {"model", "settings", "progress"} | ({"data"} & names)
    for field in fields(options):
        if field.name in names and field.name != "metrics":
            assert parameters[field.name].default == field.default, field.name


def test_every_function_that_reads_a_config_takes_settings() -> None:
    """One convention for all: values by key, beside the texts of `--set`."""
    for name in ("train", "prepare", "plan", "rehearse", "validate", "export"):
        assert {"settings", "sets"} <= {*inspect.signature(getattr(tunewell, name)).parameters}, name
