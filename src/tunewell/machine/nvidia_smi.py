"""NVIDIA GPUs as nvidia-smi reports them. The program may be missing, hang, fail or be something else."""

import re
from dataclasses import dataclass
from typing import Literal

from tunewell.machine.cards import match_card
from tunewell.machine.facts import DeviceFacts, gpu_facts
from tunewell.machine.system import System

_QUERY = "index,name,memory.total,memory.free,compute_cap,driver_version"
_SECONDS = 10.0
"""Without persistence mode, the driver is loaded first: 5 s were seen on machines with eight GPUs."""

SmiState = Literal["ok", "missing", "hangs", "fails", "unreadable", "not asked"]
"""How nvidia-smi answered."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU."""

    name: str
    driver: str
    memory_bytes: int
    """0 if it is not reported."""
    free_bytes: int
    capability: tuple[int, int] | None
    """None if it is not reported and the card is not known."""
    index: int = 0
    users: tuple[str, ...] = ()
    """Other processes that hold memory on it: `python (3.2 GiB)`."""

    def facts(self) -> DeviceFacts:
        """Return the facts as torch would report them."""
        capability = self.capability or (0, 0)
        return gpu_facts(f"cuda:{self.index}", self.name, self.memory_bytes, self.free_bytes, capability=capability)


@dataclass(frozen=True)
class SmiAnswer:
    """What nvidia-smi answered: all GPUs of the machine, or why they are not known."""

    state: SmiState
    message: str = ""
    gpus: tuple[Gpu, ...] = ()

    @property
    def problem(self) -> str | None:
        """Why the GPUs are not known, although there may be some."""
        return {
            "hangs": f"`nvidia-smi` did not answer: {self.message}",
            "fails": f"`nvidia-smi` failed: {self.message}",
            "unreadable": f"`nvidia-smi` printed something else than its table: {self.message}",
        }.get(self.state)


def query_gpus(system: System) -> SmiAnswer:
    """Ask nvidia-smi for the GPUs of the machine, those that CUDA_VISIBLE_DEVICES hides included."""
    try:
        text = system.run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], seconds=_SECONDS)
    except TimeoutError as error:
        return SmiAnswer("hangs", str(error))
    except OSError as error:
        return SmiAnswer("fails", str(error))
    return SmiAnswer("missing") if text is None else parse_gpus(text)


def parse_gpus(text: str) -> SmiAnswer:
    """Parse the table of nvidia-smi. Memory is in MiB; what a GPU does not report is `[N/A]`."""
    gpus: list[Gpu] = []
    for line in text.strip().splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < 6 or not cells[0].isdigit() or not re.match(r"\d+\.", cells[5]):
            return SmiAnswer("unreadable", line[:120])
        index, name, total, free, capability, driver, *_ = cells
        card, known = match_card(name), re.fullmatch(r"(\d+)\.(\d+)", capability)
        gpu = Gpu(
            name=name,
            driver=driver,
            memory_bytes=int(total) << 20 if total.isdigit() else 0,
            free_bytes=int(free) << 20 if free.isdigit() else 0,
            capability=(int(known[1]), int(known[2])) if known else card.capability if card else None,
            index=int(index),
        )
        if gpu.free_bytes > gpu.memory_bytes:
            return SmiAnswer("unreadable", line[:120])
        gpus.append(gpu)
    return SmiAnswer("ok", gpus=tuple(gpus))


def gpu_users(system: System) -> tuple[str, ...]:
    """Return the processes that hold memory on the GPUs: `python (3.2 GiB)`."""
    command = ["nvidia-smi", "--query-compute-apps=process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = (system.run(command, seconds=_SECONDS) or "").strip().splitlines()
    except OSError:
        return ()
    pairs = [line.rpartition(",")[::2] for line in lines]
    return tuple(
        f"{name.strip().rpartition('/')[2]} ({int(size) / 1024:.1f} GiB)"
        for name, size in ((name, size.strip()) for name, size in pairs)
        if size.isdigit()
    )
