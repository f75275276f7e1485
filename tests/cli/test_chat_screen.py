"""`tunewell chat` as a person meets it in a terminal, and as a script does in a pipe."""

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from forked import run_and_exit
from parrots import write_parrot
from tunewell.cli import main as frame
from tunewell.cli.screens.chat import COMMANDS, answer_statistics, escape_controls, run_command, split_command
from tunewell.core.errors import UserError

PATIENCE_SECONDS = 120


class Terminal:
    """A program in a terminal of its own, and what stands on it."""

    def __init__(self, *arguments: str, cwd: Path, columns: int = 80) -> None:
        self.raw = self.shown = ""
        self._read = 0
        self.pid, self._file = pty.fork()
        if self.pid == 0:  # a fork, not a new interpreter: importing torch takes seconds
            os.chdir(cwd)
            os.environ.update({"TERM": "xterm", "COLUMNS": str(columns), "LINES": "30", "NO_COLOR": "1", "CI": "1"})
            run_and_exit(("chat", *arguments))

    def wait_for(self, text: str) -> str:
        """Wait until a text appears behind what was waited for before; give all between the two."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.shown[self._read :]:
            assert time.monotonic() < deadline and self._take(), f"waited for {text!r}:\n{self.shown}"
        end = self.shown.index(text, self._read) + len(text)
        passed, self._read = self.shown[self._read : end], end
        return passed

    def _take(self) -> bool:
        if not select.select([self._file], [], [], 0.5)[0]:
            return True
        try:
            data = os.read(self._file, 65536)
        except OSError:  # how Linux says that the other side is gone
            return False
        self.raw += data.decode(errors="replace")  # what these models say is ASCII: no letter is split
        self.shown = re.sub(r"\x1b\[(\?2004[hl]\r?|[02]m)", "", self.raw).replace("\r\n", "\n")
        return bool(data)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def leave(self, key: str = "") -> int:
        """Press a key, read the rest, and give the exit code.

        Where nothing happens the key is pressed again, as a person does: a signal that comes between the prompt and
        the moment the line editor begins to wait is noticed only with the next one.
        """
        self.type(key)
        shown, deadline = self.raw, time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and self._take():
            if self.raw == shown and not select.select([self._file], [], [], 5)[0]:
                self.type(key)
        os.close(self._file)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(scope="module")
def parrots(tmp_path_factory, tiny_model) -> Path:
    """A folder with a model that answers and ends, one that says an escape sequence, and one that never ends."""
    folder = tmp_path_factory.mktemp("parrots")
    write_parrot(folder / "kind", tiny_model, "Yes, ok.")
    write_parrot(folder / "rude", tiny_model, "\x1b[31mx\r")
    write_parrot(folder / "endless", tiny_model, "Yes", then="!")
    return folder


@pytest.fixture
def chat(parrots, monkeypatch, capsys):
    """Run the command in this process, with a text as what comes through the pipe."""
    known = tuple(dict([*frame.COMMANDS, ("chat", "tunewell.cli.commands.chat")]).items())
    monkeypatch.setattr(frame, "COMMANDS", known)
    monkeypatch.chdir(parrots)
    num_threads = torch.get_num_threads()

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = frame.main(["chat", *arguments])
        return code, *capsys.readouterr()

    yield run
    torch.set_num_threads(num_threads)


def test_a_conversation_in_a_terminal(parrots):
    """One long visit: an answer, a mistyped command, the commands, a message of two lines, a paste, the way out."""
    screen = Terminal("kind", "--system", "Be kind.", cwd=parrots)
    opening = screen.wait_for("> ")
    assert "kind\n" in opening and "template: the model's own; greedy, at most 512 tokens" in opening
    assert "/help" in opening and "Ctrl-D quits" in opening
    screen.type("hello\n")
    assert re.search(r"hello\nYes, ok\.\n\d+ tokens, [\d,.]+ tokens/s\n> ", screen.wait_for("tokens/s\n> "))
    screen.type("/rest\n")
    assert "there is no command `/rest`\n  fix:   did you mean `/reset`?" in screen.wait_for("\n> ")
    screen.type("/help\n")
    listed = screen.wait_for("\n> ")
    assert [name for name in COMMANDS if f"\n{name}" not in listed] == []
    screen.type("/save kept.jsonl\n")
    assert "saved 1 answer to `kept.jsonl`" in screen.wait_for("\n> ")
    screen.type("/undo\n")
    assert "the conversation is empty" in screen.wait_for("\n> ")
    screen.type("/temperature warm\n")
    assert "takes a number" in screen.wait_for("\n> ")
    screen.type("/length 3\n")
    assert "at most 3 tokens per answer" in screen.wait_for("\n> ")
    screen.type("one \\\n")
    screen.wait_for("\n. ")
    screen.type("two\n")
    assert "cut at the maximum length" in screen.wait_for("\n> ")
    screen.type("\x1b[200~pasted one\npasted two\x1b[201~")
    screen.wait_for("pasted two")
    screen.type("\n")
    screen.wait_for("tokens/s")
    screen.wait_for("\n> ")
    screen.type("/save all.jsonl\n")
    screen.wait_for("\n> ")
    assert screen.leave("\x04") == 0
    [row] = [json.loads(line) for line in (parrots / "kept.jsonl").read_text().splitlines()]
    contents = [(message["role"], message["content"]) for message in row["messages"]]
    assert contents == [("system", "Be kind."), ("user", "hello"), ("assistant", "Yes, ok.")]
    [row] = [json.loads(line) for line in (parrots / "all.jsonl").read_text().splitlines()]
    assert [m["content"] for m in row["messages"] if m["role"] == "user"] == ["one \ntwo", "pasted one\npasted two"]


def test_ctrl_c_stops_the_answer_and_then_the_program(parrots):
    screen = Terminal("endless", "--length", "200", cwd=parrots)
    screen.wait_for("> ")
    screen.type("hello\n")
    screen.wait_for("Yes!!")
    os.kill(screen.pid, signal.SIGINT)
    assert "stopped" in screen.wait_for("\n> ")
    screen.type("/undo\n")
    assert "the conversation is empty" in screen.wait_for("\n> ")
    assert screen.leave("\x03") == 0
    assert "Traceback" not in screen.shown


def test_the_base_answers_beside_it_and_what_it_says_does_not_drive_the_terminal(parrots):
    """An answer that clears the screen, renames the window or types for the person is shown, not obeyed."""
    screen = Terminal("kind", "--base", "rude", "--with-base", cwd=parrots, columns=110)
    assert "trained from rude, which also answers" in screen.wait_for("> ")
    screen.type("hello\n")
    screen.wait_for("tokens/s; base 7 tokens\n")
    screen.type("/quit\n")
    assert screen.leave() == 0
    assert re.search(r"kind +base *\nYes, ok\. +\\x1b\[31mx\\r *\n", screen.shown), screen.shown
    assert "\x1b[31m" not in screen.raw


def test_in_a_script_the_base_comes_after_it_with_a_label(chat):
    assert chat("kind", "--base", "endless", "--with-base", "--length", "8", "--prompt", "hi") == (
        0,
        "kind:\nYes, ok.\nbase:\nYes!!!!!!\n",
        "",
    )
    code, out, err = chat("kind", "--with-base", "--prompt", "hi")
    assert (code, out) == (2, "") and "--base" in err


def test_a_script_gets_the_answer_and_nothing_else(chat):
    """Into a file it goes exactly as it is: what is shown on a screen would be another text."""
    assert chat("rude", "--prompt", "hi") == (0, "\x1b[31mx\r\n", "")
    told = json.loads(chat("kind", "--prompt", "-", "--json", stdin="from stdin\n")[1])
    assert (told["prompt"], told["answer"], told["ended"], told["model"]) == ("from stdin", "Yes, ok.", "end", "kind")
    assert told["tokens"] > 3 and told["seconds"] > 0 and told["tokens_per_second"] > 0
    assert told["base"] is None and told["checkpoint"] is None


def test_each_line_of_a_pipe_is_a_turn(chat):
    assert chat("kind", stdin="one\n\n/two is no command here\n") == (0, "Yes, ok.\nYes, ok.\n", "")
    rows = [json.loads(line) for line in chat("kind", "--json", stdin="one\ntwo")[1].splitlines()]
    assert [row["prompt"] for row in rows] == ["one", "two"]
    assert rows[1]["prompt_tokens"] > rows[0]["prompt_tokens"] + 5, "the second is asked after the first"


def test_mistakes_are_said_in_words(chat):
    for arguments in (["nowhere"], ["kind", "--temperature", "-1"], ["kind", "--length", "0"], ["kind", "--checkpont"]):
        code, out, err = chat(*arguments, "--prompt", "hi")
        assert (code, out) == (2, ""), arguments
        assert err.startswith("error: ") and "Traceback" not in err


def test_control_characters_are_spelled_out():
    for letter in [chr(code) for code in [*range(32), *range(0x7F, 0xA0), 0x202E]]:
        assert (letter in escape_controls(f"a{letter}b")) == (letter in "\n\t")
    assert escape_controls("\x1b]0;title\x07é 漢 🙂") == "\\x1b]0;title\\x07é 漢 🙂"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/save", ("/save", "")),
        (" /SAVE my file.jsonl ", ("/save", "my file.jsonl")),
        ("/system Be\nkind.", ("/system", "Be\nkind.")),
        ("/etc/hosts is what?", None),
        ("//save", None),
        ("1/2", None),
        ("/", None),
    ],
)
def test_a_command_is_told_from_a_message(line, expected):
    assert split_command(line) == expected


def test_an_unknown_command_names_the_nearest():
    with pytest.raises(UserError) as caught:
        run_command(None, "/temprature", "1")  # type: ignore[arg-type]
    assert caught.value.fix == "did you mean `/temperature`?"
    with pytest.raises(UserError) as caught:
        run_command(None, "/zzz", "")  # type: ignore[arg-type]
    assert "/help" in str(caught.value.fix)


def test_the_line_below_an_answer_says_what_matters():
    from tunewell.inference.chat import ChatAnswer

    assert answer_statistics(ChatAnswer("yes", "end", 1, 5, 0, 0.5)) == "1 token, 2.0 tokens/s"
    assert "the answer is empty" in answer_statistics(ChatAnswer("", "end", 0, 5, 0, 0.5))
    assert "end of the model's context" in answer_statistics(ChatAnswer("x", "context", 4, 5, 0, 0.5))


def test_chat_shows_the_verdict_and_samples_after_conversations(tmp_path, monkeypatch, capsys):
    """A WEAK model gave wrong prices without a word, and a persona gave the same reply to everything."""
    run, seen = tmp_path / "run", dict[str, object]()
    shutil.copytree(Path(__file__).parents[1] / "compat" / "written_by_0_1_0", tmp_path, dirs_exist_ok=True)
    shutil.move(tmp_path / "run_finished", run)
    monkeypatch.chdir(tmp_path)
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    report |= {"verdict": "WEAK", "summary": "prices are wrong", "task": {"value": "chat", "because": "a chat app"}}
    (run / "report.json").write_text(json.dumps(report), encoding="utf-8")
    assert frame.main(["chat", "run", "--prompt", "hi", "--length", "4", "--json", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verdict"] == "WEAK" and "WEAK: prices are wrong" in captured.err
    monkeypatch.setattr(
        "tunewell.cli.commands.chat.converse", lambda chat, **more: seen.update(more, options=chat.options)
    )
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for given, temperature in (([], 0.7), (["--temperature", "0"], 0.0)):
        assert frame.main(["chat", "run", "--device", "cpu", *given]) == 0
        assert seen["options"].temperature == temperature and seen["report"].summary == "prices are wrong"
