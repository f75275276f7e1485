"""Benchmark the search for near duplicates: tunewell compared with rensa and datasketch, on the same token lists.

    python benchmarks/near_duplicates.py                  1,000,000 rows made from GSM8K by edits; 3 GB of memory
    python benchmarks/near_duplicates.py --rows 50000

Bars: at least 0.8 of the speed of the faster of rensa and datasketch, and recall and precision of at least 0.95 against
the exact Jaccard similarity of the first 5,000 rows. All contenders start from token ids and use the same shingles.
tunewell returns pairs that it has checked exactly. rensa's batch functions return one unchecked flag per row; its pairs
need one object per row. The contenders that take minutes get the first 50,000 rows only. Each runs in its own process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from setting import MODEL, setting, table, write_rows

from tunewell.data.corpus.similarity import NUM_SLOTS, NearDuplicateSearch, TokenLists, jaccard, slots_per_band

THRESHOLD = 0.8
SAMPLE = 5000
SLOW = ("rensa, pairs checked exactly", "datasketch, candidates")
SLOW_ROWS = 50_000
CHUNK = 20_000


def hash_of(first: np.ndarray, second: np.ndarray, salt: int) -> np.ndarray:
    """Return a random number from 0 to 1 for each pair of numbers."""
    mixed = first.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + second.astype(np.uint64) + np.uint64(salt << 40)
    for _ in range(2):
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(0xD6E8FEB86659FD93)
    return (mixed >> np.uint64(11)) / 2.0**53


def make_documents(folder: Path, num_rows: int) -> str:
    """Write token lists: families of one to ten rows, whose members differ from their parent by 0 to 6% of the tokens.

    A parent is a GSM8K row with 40% of its tokens replaced, so that the families are not similar to each other.
    """
    from tunewell.data.tokenizers.load import load_tokenizer

    origin = write_rows(folder / "rows.jsonl", 7473)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    encoded = load_tokenizer(MODEL).backend.encode_batch_fast(texts, add_special_tokens=False)
    bases = [np.array(one.ids, dtype=np.uint32) for one in encoded]
    vocabulary = np.unique(np.concatenate(bases))
    rng = np.random.default_rng(0)
    sizes = rng.choice([1, 1, 1, 1, 2, 3, 5, 10], num_rows)
    family = np.repeat(np.arange(len(sizes)), sizes)[:num_rows]
    for start in range(0, num_rows, SAMPLE):  # families stay within 5,000 rows, so that the sample has whole ones
        rng.shuffle(family[start : start + SAMPLE])
    lengths = np.array([len(base) for base in bases])[family % len(bases)]
    edits = rng.uniform(0, 0.06, num_rows)
    with (folder / "tokens.bin").open("wb") as file:
        for start in range(0, num_rows, CHUNK):
            part = slice(start, start + CHUNK)
            tokens = np.concatenate([bases[number % len(bases)] for number in family[part].tolist()])
            position = np.concatenate([np.arange(length) for length in lengths[part].tolist()])
            of_family = np.repeat(family[part], lengths[part])
            of_row = np.repeat(np.arange(num_rows)[part], lengths[part])
            for owner, share, salt in ((of_family, 0.4, 1), (of_row, np.repeat(edits[part], lengths[part]), 2)):
                is_edited = hash_of(owner, position, salt) < share
                chosen = (hash_of(owner, position, salt + 10) * len(vocabulary)).astype(np.int64)
                tokens[is_edited] = vocabulary[chosen[is_edited]]
            file.write(tokens.astype("<u4").tobytes())
    np.save(folder / "lengths.npy", lengths.astype(np.int64))
    return origin


def load_documents(folder: Path, limit: int | None = None) -> TokenLists:
    lengths = np.load(folder / "lengths.npy")[:limit]
    tokens = np.fromfile(folder / "tokens.bin", dtype="<u4", count=int(lengths.sum()))
    return TokenLists(tokens, np.cumsum(lengths) - lengths, lengths)


def run_tunewell(documents: TokenLists) -> np.ndarray:
    """Return the rows that are similar to an earlier one."""
    return NearDuplicateSearch(documents, THRESHOLD).find().document


def run_rensa(rho: bool) -> Callable[[TokenLists], np.ndarray]:
    """Return the rows that share a band with another row, with as many slots and bands as tunewell uses."""

    def run(documents: TokenLists) -> np.ndarray:
        import rensa

        chunks = [documents.shingles(np.arange(s, min(s + 512, len(documents)))) for s in range(0, len(documents), 512)]
        hashes = np.concatenate([part for part, _ in chunks])
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([counts for _, counts in chunks]))]).astype(np.uint64)
        name = "digest_matrix_from_flat_token_hashes" + ("_rho" if rho else "")
        matrix = getattr(rensa.RMinHash, name)(hashes, offsets, NUM_SLOTS, 42)
        index = rensa.RMinHashLSH(THRESHOLD, NUM_SLOTS, NUM_SLOTS // slots_per_band(THRESHOLD))
        return np.flatnonzero(index.query_duplicate_flags_matrix_one_shot(matrix))

    return run


def run_rensa_checked(documents: TokenLists) -> np.ndarray:
    """Return the rows with an earlier candidate of rensa's index whose exact similarity reaches the threshold."""
    import rensa

    index = rensa.RMinHashLSH(THRESHOLD, NUM_SLOTS, NUM_SLOTS // slots_per_band(THRESHOLD))
    sketches = []
    for start in range(0, len(documents), CHUNK):
        rows = range(start, min(start + CHUNK, len(documents)))
        sets = [[shingle.tobytes() for shingle in documents.shingles(np.array([row]))[0]] for row in rows]
        sketches += rensa.RMinHash.from_token_sets(sets, NUM_SLOTS, 42)
    index.insert_many(sketches)
    pairs = [(row, other) for row, found in enumerate(index.query_all(sketches)) for other in found if other < row]
    later, earlier = np.array(pairs, dtype=np.int64).T
    return np.unique(later[jaccard(documents, later, earlier) >= THRESHOLD])


def run_datasketch(documents: TokenLists) -> np.ndarray:
    """Return the rows with a candidate among the earlier ones."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=THRESHOLD, num_perm=NUM_SLOTS)
    found = []
    for row in range(len(documents)):
        sketch = MinHash(num_perm=NUM_SLOTS, hashfunc=int)
        sketch.update_batch((documents.shingles(np.array([row]))[0] >> np.uint64(32)).tolist())
        if index.query(sketch):
            found.append(row)
        index.insert(str(row), sketch, check_duplication=False)
    return np.array(found)


CONTENDERS: dict[str, tuple[str, Callable[[TokenLists], np.ndarray]]] = {
    "tunewell": ("earlier", run_tunewell),
    "rensa, flags": ("any", run_rensa(rho=False)),
    "rensa, flags by rho": ("any", run_rensa(rho=True)),
    "rensa, pairs checked exactly": ("earlier", run_rensa_checked),
    "datasketch, candidates": ("earlier", run_datasketch),
}


def peak_kib() -> int:
    """Return the peak memory of this process. `ru_maxrss` would include that of the process that started it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def run_contender(folder: Path, name: str) -> None:
    """Run one contender in this process and print its time, memory and accuracy as JSON."""
    documents = load_documents(folder, SLOW_ROWS if name in SLOW else None)
    before = peak_kib()
    started = time.perf_counter()
    found = CONTENDERS[name][1](documents)
    seconds = time.perf_counter() - started
    result = {"rows": len(documents), "seconds": seconds, "found": found[found < SAMPLE].tolist(), "all": len(found)}
    print(json.dumps(result | {"added_mib": (peak_kib() - before) / 1024}))


def exact_rows(documents: TokenLists) -> dict[str, set[int]]:
    """Return the rows of the sample that are similar to an earlier row, and to any row, by comparing all pairs."""
    rows_of: dict[int, list[int]] = {}
    sizes: list[int] = []
    result: dict[str, set[int]] = {"earlier": set(), "any": set()}
    for row in range(SAMPLE):
        own = set(documents.shingles(np.array([row]))[0].tolist())
        sizes.append(len(own))
        common = Counter(other for shingle in own for other in rows_of.get(shingle, ()))
        similar = [other for other, both in common.items() if both / (len(own) + sizes[other] - both) >= THRESHOLD]
        if similar:
            result["earlier"].add(row)
            result["any"] |= {row, *similar}
        for shingle in own:
            rows_of.setdefault(shingle, []).append(row)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the speed and accuracy of searches for near duplicates.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--contender", nargs=2, metavar=("FOLDER", "NAME"), help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.contender:
        run_contender(Path(wanted.contender[0]), wanted.contender[1])
        return
    print(setting("tunewell", "numpy", "rensa", "datasketch"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        origin = make_documents(folder, wanted.rows)
        exact = exact_rows(load_documents(folder, SAMPLE))
        best: dict[str, dict] = {}
        for number in range(wanted.rounds):
            for contender in list(CONTENDERS) if number % 2 == 0 else list(reversed(CONTENDERS)):
                line = [sys.executable, __file__, "--contender", str(folder), contender]
                result = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
                if contender not in best or result["seconds"] < best[contender]["seconds"]:
                    best[contender] = result
    print(f"\n{wanted.rows:,} rows made from {origin}, threshold {THRESHOLD}, best of {wanted.rounds}. "
          f"{len(exact['earlier']):,} of the first {SAMPLE:,} rows are similar to an earlier one.\n")  # fmt: skip
    print(report(best, exact))


def report(results: dict[str, dict], exact: dict[str, set[int]]) -> str:
    rates = {name: result["rows"] / result["seconds"] for name, result in results.items()}
    rows = []
    for name, result in results.items():
        found, true = set(result["found"]), exact[CONTENDERS[name][0]]
        rows.append(
            [
                f"{name} ({result['rows']:,} rows)",
                f"{result['seconds']:.1f} s",
                f"{rates[name]:,.0f}",
                f"{rates['tunewell'] / rates[name]:.2f}",
                f"{result['added_mib']:,.0f} MiB",
                f"{len(found & true) / max(len(true), 1):.3f}",
                f"{len(found & true) / max(len(found), 1):.3f}",
                f"{result['all']:,}",
            ]
        )
    header = ["", "time", "rows/s", "tunewell is x times as fast", "added memory", "recall", "precision", "rows found"]
    return table(header, rows)


if __name__ == "__main__":
    main()
