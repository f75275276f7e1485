"""Ask the user in a terminal: numbered options, of which Enter takes the first."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tunewell.cli.progress import shown_progress
from tunewell.cli.render import folded_table, hanging, one_line
from tunewell.core.progress import Progress, ProgressListener
from tunewell.core.questions import Asker, MenuQuestion


@contextmanager
def progress_and_questions(*, can_ask: bool = True) -> Iterator[tuple[ProgressListener, Asker | None]]:
    """Yield a progress listener, and a function that asks in the terminal, or None if nobody can answer.

    The live display is closed while a question is open, because it would overwrite the answer.
    """
    with ExitStack() as display:
        shown: list[ProgressListener] = []

        def show(progress: Progress) -> None:
            if not shown:
                shown.append(display.enter_context(shown_progress()))
            shown[0](progress)

        def ask(question: MenuQuestion) -> str | None:
            display.close()
            shown.clear()
            return ask_in_terminal(question)

        yield show, ask if can_ask and sys.stdin.isatty() and sys.stderr.isatty() else None


def ask_in_terminal(question: MenuQuestion) -> str | None:
    """Print a question to stderr and read the number of an option. Return None at the end of the input."""
    lines = [hanging("", question.text)]
    if question.shown:
        lines = [folded_table([[f"  {name}", text] for name, text in question.shown]), "", *lines]
    rows = [[f"  {number}", label] for number, (_, label) in enumerate(question.options, 1)]
    sys.stderr.write("\n" + "\n".join([*lines, folded_table(rows, right=(0,))]) + "\n")
    while True:
        sys.stderr.write(f"number [1 = {one_line(question.options[0][1])}]: ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            sys.stderr.write("\n")
            return None
        if (value := _chosen(line.strip(), question)) is not None:
            return value
        sys.stderr.write(f"please type a number from 1 to {len(question.options)}, or press Enter\n")


def _chosen(text: str, question: MenuQuestion) -> str | None:
    """Return the option that a line names by its number or its value. An empty line names the first."""
    if not text:
        return question.options[0][0]
    if text.isdecimal() and 1 <= int(text) <= len(question.options):
        return question.options[int(text) - 1][0]
    return next((value for value, _ in question.options if value.casefold() == text.casefold()), None)
