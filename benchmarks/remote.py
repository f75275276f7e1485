"""Rows in object storage: how fast they are read the first time and from the cache, compared with local files.

    python benchmarks/remote.py [--objects 200] [--runs 3]

A real S3 server (SeaweedFS) runs on the same machine and uses its cores: the cost of a first read is an upper bound.
Each measurement is a process of its own. `rows` hashes each file and splits it into rows, as `prepare` does before it
tokenises; `prepare` is the whole command on the first four objects.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / "storage"), str(ROOT / "tests" / "data")]
OBJECT_BYTES = 5_000_000
_WORDS = [
    "the",
    "answer",
    "is",
    "what",
    "it",
    "was",
    "when",
    "she",
    "asked",
    "him",
    "how",
    "many",
    "apples",
    "were",
    "left",
    "in",
    "the",
    "old",
    "basket",
]


def write_objects(folder: Path, number: int) -> None:
    """Write files of rows, each of 5 MB."""
    folder.mkdir(parents=True)
    for index in range(number):
        chance = random.Random(index)
        with (folder / f"part-{index:03d}.jsonl").open("w") as file:
            size = 0
            while size < OBJECT_BYTES:
                words = chance.choices(_WORDS, k=60)
                line = json.dumps(
                    {"question": f"{index} {size} {' '.join(words[:15])}?", "answer": " ".join(words[15:])}
                )
                size += file.write(line + "\n")


def measure(kind: str, path: str, model: str, out: str) -> None:
    """Read rows, or prepare them; print seconds, bytes and peak memory as JSON."""
    from tunewell.data.sources.base import find_files
    from tunewell.data.sources.blocks import ReadOptions, read_blocks
    from tunewell.workflows.prepare import prepare

    started = time.perf_counter()
    if kind == "rows":
        files = find_files(path, base=Path())
        num_bytes = num_rows = 0
        for file in files:
            num_bytes += len(file.sha256()) and file.source.size()
            num_rows += sum(map(len, read_blocks(file, ReadOptions(1 << 22, 64))))
    else:
        manifest = prepare(model=model, data=[path], out=out).manifest
        num_bytes, num_rows = sum(source.bytes for source in manifest.sources), manifest.rows_in
    seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "bytes": num_bytes, "rows": num_rows, "memory_mib": memory}))


def run_child(kind: str, path: str, model: Path, out: Path) -> dict[str, float]:
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, "--measure", kind, path, str(model), str(out / "corpus")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def compare(kind: str, local: str, remote: str, model: Path, folder: Path, runs: int) -> None:
    """Print one row of the table: local files, first read, second read."""
    seconds: dict[str, list[float]] = {"local": [], "first": [], "cached": []}
    memory: dict[str, float] = {}
    rows = set()
    for _ in range(runs):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        for name, path in (("local", local), ("first", remote), ("cached", remote)):
            found = run_child(kind, path, model, folder / "out")
            seconds[name].append(found["seconds"])
            memory[name] = max(memory.get(name, 0.0), found["memory_mib"])
            rows.add(found["rows"])
            size = found["bytes"]
    assert len(rows) == 1, "remote and local rows differ"
    ratios = {
        name: [own / other for own, other in zip(seconds["local"], seconds[name], strict=True)] for name in seconds
    }
    for name in seconds:
        rate, ratio = size / 1e6 / statistics.median(seconds[name]), statistics.median(ratios[name])
        spread = f"{min(ratios[name]):.0%} to {max(ratios[name]):.0%}"
        figures = f"{rate:,.0f} MB/s | {ratio:.0%} ({spread}) | {memory[name]:,.0f} MiB"
        print(f"| {kind}, {size / 1e6:,.0f} MB | {name} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--objects", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--measure", nargs=4)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    from s3_server import KEY, SECRET, s3_server
    from tiny import write_tiny_model

    from tunewell.config.rules import Storage
    from tunewell.features.remote.address import parse_address
    from tunewell.features.remote.store import RemoteStore

    with tempfile.TemporaryDirectory(prefix="tunewell-remote-") as temporary:
        folder = Path(temporary)
        write_objects(folder / "rows", options.objects)
        model = write_tiny_model(folder / "model")
        (folder / "server").mkdir()
        os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
        os.environ["TUNEWELL_CACHE"] = str(folder / "cache")
        with s3_server(folder / "server") as endpoint:
            os.environ["AWS_ENDPOINT_URL"] = endpoint
            first = parse_address("s3://rows/all/part-000.jsonl")
            store = RemoteStore(first, Storage())
            names = sorted(path.name for path in (folder / "rows").iterdir())
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda name: store.upload(folder / "rows" / name, first.with_key(f"all/{name}")), names))
            print("| | | rate | share of the rate of local files (spread) | peak memory |\n|---|---|---|---|---|")
            compare("rows", str(folder / "rows"), "s3://rows/all", model, folder, options.runs)
            few = "part-00[0-3].jsonl"
            compare("prepare", f"{folder}/rows/{few}", f"s3://rows/all/{few}", model, folder, options.runs)
            written = [path for name in ("cache", "out") for path in (folder / name).rglob("*") if path.is_file()]
            found = sum(secret.encode() in path.read_bytes() for path in written for secret in (KEY, SECRET))
            print(f"\naccess keys found in {len(written):,} written files: {found}")


if __name__ == "__main__":
    main()
