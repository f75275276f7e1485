"""The prediction of a run: memory by part and phase, seconds by phase. It is part of `plan.json` and `outcome.json`."""

from tunewell.records.base import Record


class MemoryPrediction(Record):
    """Memory of the training process: on a GPU what it holds on the card, on a CPU its resident set."""

    peak_bytes: int
    """The maximum over all phases, with memory that the allocator holds but does not use, and with `cached_bytes`."""
    needed_bytes: int
    """The peak without either: with less, the run runs out of memory."""
    low_bytes: int
    high_bytes: int
    """The range in which `peak_bytes` is expected."""
    free_bytes: int | None = None
    parts: dict[str, int] = {}
    """Bytes by part. `evaluation` and `generation` are not held together with the parts of a step."""
    phases: dict[str, int] = {}
    """The peak of each phase, without `cached_bytes`."""
    host_bytes: int | None = None
    """Main memory of a run on a GPU; None if it is small."""
    cached_bytes: int = 0
    """What dequantised weights add to the peak while answers are generated. They are cached only if enough is free."""

    @property
    def uncached_bytes(self) -> int:
        """The peak without cached weights."""
        return self.peak_bytes - self.cached_bytes


class TimePrediction(Record):
    """Duration of the whole run in seconds."""

    low: float
    high: float
    expected: float
    phases: dict[str, float] = {}


class DiskPrediction(Record):
    """Disk space in bytes."""

    checkpoint_bytes: int
    checkpoints_bytes: int
    """Of all checkpoints that are kept, and one that is being written."""
    export_bytes: int = 0
    free_bytes: int | None = None


class Prediction(Record):
    """What a run will need, and how it was found."""

    fits: bool
    is_measured: bool = False
    """Whether real steps were taken. Otherwise the numbers follow from the architecture alone."""
    memory: MemoryPrediction
    seconds: TimePrediction
    disk: DiskPrediction | None = None
    is_compiled: bool = False
    basis: list[str] = []
    """Where the numbers come from, one sentence each."""


class Measurement(Record):
    """What a run needed."""

    peak_bytes: int | None = None
    seconds: float
    phases: dict[str, float] = {}
