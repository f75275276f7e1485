"""Errors for unknown keywords of library functions, which name the setting or the parameter that was meant."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tunewell.config.keys import nearest_keys
from tunewell.core.errors import close_names, did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")


def naming_the_way_out(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function; an unknown keyword raises a TypeError with what to write instead."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name, value in kwargs.items():
            if name not in known:
                fix = _way_out(name, value, known)
                raise TypeError(f"{function.__name__}() has no parameter `{name}`: {fix}")
        return function(*args, **kwargs)

    return call


def _way_out(name: str, value: Any, known: Iterable[str]) -> str:
    guesses, keys = close_names(name, known), nearest_keys(name) if "settings" in known else []
    if keys and not guesses:
        return f'write the setting as `settings={{"{keys[0]}": {value!r}}}`'
    return did_you_mean(guesses, f"it has {', '.join(known)}")
