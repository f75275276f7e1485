"""Silence the progress bars and warnings of transformers."""

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let transformers log errors only inside a `with` block."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
