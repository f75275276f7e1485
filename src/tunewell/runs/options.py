"""Options of one `train` call that are not part of the config: resuming, the command line, process-wide settings."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to start or resume a training. The defaults are those of a library call."""

    is_resuming: bool = False
    allowed_changes: Sequence[str] = ()
    """Settings that may differ from the checkpoint on resume: the names after `--allow-change`."""
    allow_pickle: bool = False
    argv: Sequence[str] | None = None
    """The arguments after `tunewell train`, as typed; None in a library call."""
    supervisor_fds: str | None = None
    """File descriptors opened by the supervisor, `READ,WRITE,STACKS`; None without a supervisor."""
    owns_process: bool = False
    """True on the command line: the run may then set signal handlers, the number of threads and the allocator."""
    faults: str | None = None
    """Faults to inject in tests of tunewell, for example `nan@gradients:step=7`."""
    allow_faults: bool = False
