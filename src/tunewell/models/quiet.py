"""Keep transformers from writing bars and warnings on a screen that is not its own."""

import contextlib
import io
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let transformers speak only of errors, and put its settings back afterwards."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drop what is written to stderr too: the reader of GGUF files draws a bar that no setting turns off."""
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        yield
