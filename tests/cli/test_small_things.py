"""Small things that users met: each of these tests failed before."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tunewell.cli.commands.inspect import _show_tokens
from tunewell.cli.main import main
from tunewell.cli.render import has_color
from tunewell.cli.screens import chat as chat_screen
from tunewell.cli.screens.verdict import _growth
from tunewell.data.templates.chat_template import ChatTemplate
from tunewell.evaluation.report.view import perplexity_change
from tunewell.methods.peft_format import suggest_names
from tunewell.records.report import LossPair
from tunewell.runs.resolve import resolve_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("command", ["/exit", "/bye", "/quit", "/EXIT"])
def test_a_chat_ends_with_the_commands_of_other_programs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `/exit` as an unknown command: it is the one of Ollama's users and of most shells."""
    messages = iter([command, None])
    monkeypatch.setattr(chat_screen, "_read_message", lambda: next(messages))
    monkeypatch.setattr(chat_screen, "print_header", lambda *_, **__: None)
    chat_screen.converse(object(), with_base=False)  # type: ignore[arg-type]  it is never asked anything
    assert next(messages) is None, "the conversation went on after the command"


def test_without_colour_supervised_tokens_are_in_brackets() -> None:
    """Guards against `tokens on green` under NO_COLOR in a terminal, where rich still names a colour system."""
    out = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=True)
    assert not has_color(out)

    class Token:
        text, is_supervised = "hello", True

    class View:
        tokens = (Token(),)

    _show_tokens(View(), out)  # type: ignore[arg-type]
    assert "[hello]" in out.file.getvalue()  # type: ignore[attr-defined]
    assert has_color(Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False))


def test_a_perplexity_that_grew_is_remarked() -> None:
    """Guards against a perplexity four times higher without a comment."""
    pair = LossPair(name="everyday text", documents=1, tokens=9, base=3.0, tuned=4.386)
    assert perplexity_change(pair) == "4.0 times as high"
    assert _growth(pair) == "+46%, perplexity 4.0 times as high"
    same = LossPair(name="everyday text", documents=1, tokens=9, base=3.0, tuned=3.05)
    assert perplexity_change(same) == "" and _growth(same) == "+2%"
    assert perplexity_change(pair.model_copy(update={"base": 4.386, "tuned": 3.0})) == "4.0 times as low"


def test_the_current_folder_has_a_name(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `validate .`, which named an empty path in its error."""
    monkeypatch.chdir(tiny_model)
    assert resolve_model(".").name == tiny_model.name


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ("<|im_start|>system\nSay the time.<|im_end|>\n<|im_start|>assistant\n", "Say the time."),
        ("and what then?<|im_end|>\n<|im_start|>assistant\n", "and what then?"),
        ("<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n", "42"),
    ],
)
def test_a_question_never_has_template_text(prompt: str, question: str) -> None:
    """Guards rows without a user's message, whose question was the rendered prompt."""
    assert ChatTemplate(CHATML, special_tokens={}).question_in(prompt) == question


def test_renamed_tensors_of_an_adapter_are_named_with_the_fix() -> None:
    """Guards adapters that another tool saved: the advice was to look for another base model."""
    expected = [f"base_model.model.model.layers.{layer}.q_proj.lora_{part}.weight" for layer in (0, 1) for part in "AB"]
    for old, new in ((".weight", ".default.weight"), (".layers.", ".h."), (".q_proj.", ".query.")):
        found = [name.replace(old, new) for name in expected]
        fix = suggest_names(expected, found)
        assert fix.startswith("rename `"), fix
        before, after = fix.split("`")[1], fix.split("`")[3]
        assert [name.replace(before, after, 1) for name in found] == expected
    assert "base model" in suggest_names(expected, ["something.else"])


def test_a_run_in_place_of_rows_is_answered_with_the_command_that_resumes_it(tmp_path, monkeypatch, capsys) -> None:
    """Guards against "no model is named; add `--model`" for `tunewell train --resume runB`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run B").mkdir()
    (tmp_path / "run B" / "plan.json").write_text("{}")
    assert main(["train", "--resume", "run B"]) == 2
    assert "`tunewell train --out 'run B' --resume`" in capsys.readouterr().err


def test_the_command_that_resumes_a_run_uses_the_settings_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a command that reads the `tunewell.yaml` of another job in this folder, which takes precedence."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/plan.json").write_text("{}")
    assert main(["train", "run"]) == 2
    assert "`tunewell train --out run --resume`" in capsys.readouterr().err
    Path("tunewell.yaml").write_text("model: other\n")
    assert main(["train", "run"]) == 2
    assert "`tunewell train --config run/config.yaml --out run --resume`" in capsys.readouterr().err
