"""How many examples a property test tries: 25 by default, its full number in `make test-all`."""

import os

_DEFAULT = 25


def examples(full: int) -> int:
    """Return the number for `@settings(max_examples=...)`."""
    return full if os.environ.get("TUNEWELL_TESTS") == "all" else min(full, _DEFAULT)
