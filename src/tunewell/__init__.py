"""Fine-tune a language model on your own conversations, and know that it worked."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunewell.core.errors import UserError
    from tunewell.data.corpus.reader import open_corpus
    from tunewell.integrations.hf_callback.callback import HealthCallback
    from tunewell.workflows.export import export
    from tunewell.workflows.prepare import prepare
    from tunewell.workflows.train import train
    from tunewell.workflows.validate import validate

    __version__: str

__all__ = ["HealthCallback", "UserError", "__version__", "export", "open_corpus", "prepare", "train", "validate"]

_HOMES = {
    "HealthCallback": "tunewell.integrations.hf_callback.callback",
    "UserError": "tunewell.core.errors",
    "export": "tunewell.workflows.export",
    "open_corpus": "tunewell.data.corpus.reader",
    "prepare": "tunewell.workflows.prepare",
    "train": "tunewell.workflows.train",
    "validate": "tunewell.workflows.validate",
}
"""Where each name lives; it is imported when it is first asked for, so that `import tunewell` costs nothing."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'tunewell' has no attribute {name!r}")
    globals()[name] = value
    return value


class _TopLevelModule(ModuleType):
    """Keeps `tunewell.export` the function: importing the package `tunewell.export` would replace it by the package."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _TopLevelModule


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tunewell")
    except PackageNotFoundError:
        return "0+source"
