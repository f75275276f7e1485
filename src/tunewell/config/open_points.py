"""Open points of a config: keys with the value `?`, which `tunewell init` writes for what it could not decide."""

from collections.abc import Iterator

from tunewell.config.load import LoadedConfig
from tunewell.config.schema import OPEN
from tunewell.core.errors import UserError
from tunewell.core.units import count

_QUESTIONS = {
    "columns": "which of your columns is the question, which the answer",
    "assistant": "whose messages the model shall learn to write",
    "encoding": "the character encoding of the file",
    "separator": "the character between two columns",
}
"""Keys of a source that `init` may leave open."""


def open_points(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Yield each key that is open, and what it must say."""
    for index, source in enumerate(loaded.config.data.sources):
        for key, question in _QUESTIONS.items():
            value = getattr(source, key)
            if value == OPEN or (key == "columns" and OPEN in value.values()):
                yield f"data.sources[{index}].{key}", question


def require_no_open_points(loaded: LoadedConfig) -> None:
    """Raise UserError if a key of the config is still `?`."""
    found = list(open_points(loaded))
    if not found:
        return
    raise UserError(
        f"the config has {count(len(found), 'open point')}: " + "; ".join(f"`{key}`: {what}" for key, what in found),
        where=", ".join(dict.fromkeys(loaded.origin(key) for key, _ in found)),
        fix="replace `?` there; the comment beside it has the likeliest value. In a terminal, "
        "`tunewell init FILE --force` asks for it",
    )
