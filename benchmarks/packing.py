"""Benchmark packing: tunewell compared with best-fit decreasing and TRL's packer, on the same lengths.

    python benchmarks/packing.py

Lengths are log-normal with a mean of about 186 tokens and a maximum of 1,024, as in a real chat dataset.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from setting import setting, table

from tunewell.data.corpus.packing import pack

CONTEXT = 1024


def chat_lengths(number: int) -> np.ndarray:
    """Draw lengths from a seeded generator, so that every run packs the same documents."""
    drawn = np.random.default_rng(4).lognormal(np.log(186) - 0.15, 0.55, number)
    return np.clip(drawn, 8, CONTEXT).astype(np.int64)


def ours(lengths: np.ndarray) -> tuple[float, int]:
    started = time.perf_counter()
    packing = pack(lengths, CONTEXT)
    return time.perf_counter() - started, packing.num_sequences


def best_fit_decreasing(lengths: np.ndarray) -> tuple[float, int]:
    """Put each document, longest first, into the sequence with the least room that holds it; exact, over all of them.

    The bits of a big integer say which rooms there are, so that the tightest is found in a few machine words.
    """
    started = time.perf_counter()
    sequences_with: dict[int, list[list[int]]] = defaultdict(list)
    rooms = 0
    num_sequences = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sequence = sequences_with[room].pop()
            if not sequences_with[room]:
                rooms ^= 1 << room
        else:
            room, sequence = CONTEXT, []
            num_sequences += 1
        sequence.append(index)
        sequences_with[room - length].append(sequence)
        rooms |= 1 << (room - length)
    return time.perf_counter() - started, num_sequences


def trl(lengths: np.ndarray) -> tuple[float, int]:
    """Run TRL's `pack_dataset`, strategy `bfd`, which packs a thousand documents at a time."""
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_caching()
    datasets.disable_progress_bars()
    # One byte a token instead of four: less to move, in TRL's favour.
    tokens = np.zeros(int(lengths.sum()), dtype=np.int8)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    dataset = datasets.Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)}))
    started = time.perf_counter()
    packed = pack_dataset(dataset, CONTEXT, "bfd")
    return time.perf_counter() - started, packed.num_rows


PACKERS: dict[str, Callable[[np.ndarray], tuple[float, int]]] = {
    "tunewell": ours,
    "best-fit decreasing": best_fit_decreasing,
    "TRL `pack_dataset`, bfd": trl,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare packers on the same lengths.")
    parser.add_argument("--documents", type=int, nargs="+", default=[136_951, 1_000_000], help="numbers of documents")
    parser.add_argument("--without-trl", action="store_true", help="skip TRL, which takes longest")
    wanted = parser.parse_args()
    print(setting("tunewell", "numpy", "trl", "datasets"))
    for number in wanted.documents:
        lengths = chat_lengths(number)
        tokens = int(lengths.sum())
        least = -(-tokens // CONTEXT)
        print(f"\n{number:,} documents, mean {lengths.mean():.0f} tokens, longest {lengths.max():,}.")
        print(f"Sequences of {CONTEXT:,} tokens; the minimum is {least:,}.\n")
        rows = []
        for name, packer in PACKERS.items():
            if wanted.without_trl and packer is trl:
                continue
            seconds, sequences = packer(lengths)
            full = tokens / (sequences * CONTEXT)
            rows.append([name, f"{seconds:.2f}", f"{sequences:,}", f"{sequences - least:,}", f"{full:.4%}"])
        print(table(["packer", "seconds", "sequences", "above the minimum", "efficiency"], rows))


if __name__ == "__main__":
    main()
