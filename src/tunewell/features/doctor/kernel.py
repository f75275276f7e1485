"""Find packages that a notebook kernel imported before they were replaced on disk."""

import sys
from collections.abc import Mapping

from tunewell.features.doctor.facts import public_version
from tunewell.features.doctor.packages import STACK


def held_in_this_process(installed: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the packages that this process holds in another version than the installed one."""
    found: list[tuple[str, str, str]] = []
    for name, module in STACK.items():
        held, now = getattr(sys.modules.get(module), "__version__", None), installed.get(name)
        if isinstance(held, str) and now is not None and public_version(held) not in (None, public_version(now)):
            found.append((name, held, now))
    return found
