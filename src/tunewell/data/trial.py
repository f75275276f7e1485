"""Try code from a model's files in a child process with limits: its chat template, the expressions of its tokenizer.

Such code may run for ever, take all memory or make a library crash, and would end this process without an error
message. Code that passes is remembered by its hash and runs in this process. Only processor time counts, because the
child waits on a busy machine.
"""

import math
import time
from typing import Any

from tunewell.core.cache import DiskCache
from tunewell.core.child import ChildDied, answer, call, limit_resources
from tunewell.core.progress import Progress, ProgressListener
from tunewell.core.registry import load_path

_VERSION = 1
_MODULE = "tunewell.data.trial"
_WAIT_SECONDS = 120
_MAX_BYTES = 1 << 30
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
"""The threads of a library would take address space, which is limited."""
_PASSED = DiskCache("trials")


def find_problem(function: str, arguments: list[Any], *, doing: str, seconds: int) -> str:
    """Call `module:function`, which returns a problem, in a child process. Return the problem, or an empty text.

    `doing` names what the function does with a short text: `encoding`.
    """
    key = [_VERSION, function, arguments]
    if _PASSED.read(key) is not None:
        return ""
    begun: list[Progress] = []
    slow, request = f"{doing} a short text takes more than {seconds} s", [function, arguments, seconds]
    try:
        problem = call(_MODULE, request, progress=begun.append, seconds=_WAIT_SECONDS, environment=_ONE_THREAD)
    except TimeoutError:
        problem = slow
    except ChildDied as died:
        # With RUST_BACKTRACE, a note and the stack follow the message.
        lines = [line for line in died.ended.err.strip().splitlines() if not line.startswith(("note:", " "))]
        problem = f"{doing} a short text ends the program ({(lines or ['no message'])[-1][:120]})"
        if died.ended.signal_name == "SIGXCPU":
            problem = slow
        if not begun:  # the child could not start: the code is not to blame
            return ""
    if not problem:  # a problem is not stored, because the machine may have caused it
        _PASSED.write(key, {"problem": ""})
    return problem


def _try(request: Any, progress: ProgressListener) -> str:
    function, arguments, seconds = request
    tried = load_path(function)
    progress(Progress("trying"))
    used = math.ceil(time.process_time())  # by the imports
    limit_resources(memory_bytes=_MAX_BYTES, processor_seconds=used + seconds)
    try:
        return tried(*arguments)
    except MemoryError:
        return "it takes too much memory for a short text"


if __name__ == "__main__":
    answer(_try)
