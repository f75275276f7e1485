"""Fine-tune a language model on your own conversations, and know that it worked."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunewell.core.errors import UserError
    from tunewell.core.progress import Progress
    from tunewell.data.corpus.reader import open_corpus
    from tunewell.features.compare.api import compare
    from tunewell.features.diagnose.diagnose import diagnose
    from tunewell.features.doctor.api import doctor
    from tunewell.features.hf_callback.callback import HealthCallback
    from tunewell.features.retrieval.api import ask, index
    from tunewell.features.sweep.api import sweep
    from tunewell.library.functions import export, plan, prepare, rehearse, train, validate
    from tunewell.library.model import Model, load
    from tunewell.planning.result import PlanResult
    from tunewell.records.report import Validation
    from tunewell.runs.rehearsal import Rehearsal
    from tunewell.runs.result import TrainResult
    from tunewell.training.events import Evaluated, Event, Healed, Note, Rewound, RunStarted, StepTaken
    from tunewell.workflows.export import ExportResult
    from tunewell.workflows.prepare import PrepareResult

    __version__: str

_HOMES = {
    "tunewell.core.errors": ["UserError"],
    "tunewell.core.progress": ["Progress"],
    "tunewell.data.corpus.reader": ["open_corpus"],
    "tunewell.library.functions": ["export", "plan", "prepare", "rehearse", "train", "validate"],
    "tunewell.library.model": ["Model", "load"],
    "tunewell.planning.result": ["PlanResult"],
    "tunewell.records.report": ["Validation"],
    "tunewell.runs.rehearsal": ["Rehearsal"],
    "tunewell.runs.result": ["TrainResult"],
    "tunewell.training.events": ["Evaluated", "Event", "Healed", "Note", "Rewound", "RunStarted", "StepTaken"],
    "tunewell.workflows.export": ["ExportResult"],
    "tunewell.workflows.prepare": ["PrepareResult"],
}
"""The module of each public name of the spine; `core/features.toml` has those of features.

Modules are imported on first use, so that `import tunewell` is fast.
"""

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
    # Results, and the events that `progress` receives.
    "Evaluated",
    "Event",
    "ExportResult",
    "Healed",
    "Model",
    "Note",
    "PlanResult",
    "PrepareResult",
    "Progress",
    "Rehearsal",
    "Rewound",
    "RunStarted",
    "StepTaken",
    "TrainResult",
    "Validation",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    else:
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None and name in __all__:
            from tunewell.core.features import modules

            home = modules("functions").get(name)
        if home is None:
            raise AttributeError(f"module 'tunewell' has no attribute {name!r}")
        value = getattr(import_module(home), name)
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
