"""Fine-tune a language model on your own conversations, and know that it worked."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunewell.core.errors import UserError
    from tunewell.data.corpus.reader import open_corpus
    from tunewell.features.compare.api import compare
    from tunewell.features.diagnose.diagnose import diagnose
    from tunewell.features.doctor.api import doctor
    from tunewell.features.hf_callback.callback import HealthCallback
    from tunewell.features.retrieval.api import ask, index
    from tunewell.features.sweep.api import sweep
    from tunewell.library.functions import export, plan, prepare, rehearse, train, validate
    from tunewell.library.model import load

    __version__: str

__all__ = [
    "HealthCallback",
    "UserError",
    "__version__",
    "ask",
    "compare",
    "doctor",
    "diagnose",
    "export",
    "index",
    "load",
    "open_corpus",
    "plan",
    "prepare",
    "rehearse",
    "sweep",
    "train",
    "validate",
]

_HOMES = {
    "UserError": "tunewell.core.errors",
    "export": "tunewell.library.functions",
    "load": "tunewell.library.model",
    "open_corpus": "tunewell.data.corpus.reader",
    "plan": "tunewell.library.functions",
    "prepare": "tunewell.library.functions",
    "rehearse": "tunewell.library.functions",
    "train": "tunewell.library.functions",
    "validate": "tunewell.library.functions",
}
"""The module of each public name of the spine; `core/features.toml` has those of features.

Modules are imported on first use, so that `import tunewell` is fast.
"""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        from tunewell.core.features import modules

        found = modules("functions") if name in __all__ else {}
        if name not in found:
            raise AttributeError(f"module 'tunewell' has no attribute {name!r}")
        value = getattr(import_module(found[name]), name)
    globals()[name] = value
    return value


class _TopLevelModule(ModuleType):
    """Keeps `tunewell.export` the function: importing the package `tunewell.export` would replace it by the package."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
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
