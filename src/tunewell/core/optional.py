"""Import optional dependencies when they are used."""

import importlib
from types import ModuleType

from tunewell.core.errors import UserError


def import_optional(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency; raise UserError with the install command if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{purpose} needs `{module}`", fix=f'pip install "tunewell[{extra}]"') from error
