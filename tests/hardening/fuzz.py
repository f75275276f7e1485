"""Fuzz every parser of foreign bytes with Atheris, guided by the coverage of our code.

    python tests/hardening/fuzz.py --seconds 180                 every parser, three minutes each
    python tests/hardening/fuzz.py --parser gguf --seconds 60    one of them

An input fails if an unexpected exception leaves the parser, if it takes more than 2 s of processor time (a busy machine
is slower), or more than 1 GB of memory.
Inputs with new coverage are kept in `.fuzz/PARSER/` and used again; failures are written to
`tests/hardening/crashes/PARSER/`, which `test_parsers.py` replays.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
KEPT = Path(".fuzz")
CRASHES = HERE / "crashes"
MAX_SECONDS_PER_INPUT = 2
MAX_MEMORY_MB = 1024
MAX_INPUT_BYTES = 16_384


def fuzz_one(name: str, seconds: int) -> None:
    """Fuzz one parser in this process. libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["tunewell"]):
        from parsers import PARSERS, seeds

        for data in seeds(name):
            PARSERS[name](data)  # imports what it needs, so that all of it is instrumented
    folder, crashes = KEPT / name, CRASHES / name
    folder.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(name)):
        (folder / f"seed-{number}").write_bytes(data)
    options = {
        "max_total_time": seconds,
        "timeout": 30 * MAX_SECONDS_PER_INPUT,
        "rss_limit_mb": MAX_MEMORY_MB,
        "max_len": MAX_INPUT_BYTES,
        "artifact_prefix": f"{crashes}/",
        "print_final_stats": 1,
        "verbosity": 0,
    }

    def timed(data: bytes) -> None:
        started = time.process_time()
        PARSERS[name](data)
        seconds = time.process_time() - started
        assert seconds <= MAX_SECONDS_PER_INPUT, f"{seconds:.1f} s of processor time"

    atheris.Setup([sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(folder)], timed)
    atheris.Fuzz()


def report(name: str, seconds: int) -> bool:
    """Fuzz one parser in a child; print a line with what came of it, and return whether all inputs held."""
    started = time.monotonic()
    arguments = [sys.executable, __file__, "--parser", name, "--seconds", str(seconds), "--here"]
    done = subprocess.run(arguments, capture_output=True, text=True, errors="replace")
    stats = dict(re.findall(r"stat::(\w+):\s+(\d+)", done.stderr))
    num_inputs = len(list((KEPT / name).glob("*")))
    executions = int(stats.get("number_of_executed_units", 0))
    slowest, peak = stats.get("slowest_unit_time_sec", "?"), stats.get("peak_rss_mb", "?")
    state = "held" if done.returncode == 0 else "FAILED"
    took = time.monotonic() - started
    print(
        f"{name:14} {executions:>10,} executions in {took:4.0f} s   slowest {slowest} s   {peak} MB   "
        f"{num_inputs:,} inputs kept   {state}",
        flush=True,
    )
    if done.returncode != 0:
        print(done.stdout[-2000:] + done.stderr[-1500:], flush=True)
    return done.returncode == 0


def main() -> int:
    """Fuzz one or all parsers; return 1 if an input failed."""
    parser = argparse.ArgumentParser(description="Fuzz the parsers of foreign bytes.")
    parser.add_argument("--parser", default=None)
    parser.add_argument("--seconds", type=int, default=180, help="for each parser")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        fuzz_one(options.parser, options.seconds)
        return 0
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("fuzzing needs Atheris, which exists for Linux and macOS: pip install atheris==3.0.0")
        return 2
    from parsers import PARSERS

    results = [report(name, options.seconds) for name in PARSERS if options.parser in (None, name)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
