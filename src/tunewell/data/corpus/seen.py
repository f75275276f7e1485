"""Remember which digests were seen, in 32 to 64 bytes each."""

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.uint8]
_START_SLOTS = 1 << 12
_MOVED_SLOTS = 1 << 16


class SeenDigests:
    """A set of 16-byte digests in open addressing, worked on by whole arrays.

    A Python set of `bytes` needs about 110 bytes a row (measured at one million), this one 32 to 64.
    """

    def __init__(self) -> None:
        self._low = np.zeros(_START_SLOTS, dtype=np.uint64)
        self._high = np.zeros(_START_SLOTS, dtype=np.uint64)
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Add digests in order; True for each that was not there before, False for repeats, within the call too."""
        low, high = _halves(digests)
        is_new = np.zeros(len(low), dtype=bool)
        firsts = _first_of_equals(low, high)
        while (self._num + len(firsts)) * 2 > len(self._low):
            self._grow()
        inserted = self._insert(low[firsts], high[firsts])
        is_new[firsts[inserted]] = True
        self._num += int(inserted.sum())
        return is_new

    def contains(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Tell for each digest whether it was added."""
        low, high = _halves(digests)
        slot = self._slot(low)
        found = np.zeros(len(low), dtype=bool)
        waiting = np.arange(len(low))
        while len(waiting):
            there_low, there_high = self._low[slot[waiting]], self._high[slot[waiting]]
            same = (there_low == low[waiting]) & (there_high == high[waiting])
            found[waiting[same]] = True
            waiting = waiting[~same & ((there_low != 0) | (there_high != 0))]
            slot[waiting] = (slot[waiting] + np.uint64(1)) & np.uint64(len(self._low) - 1)
        return found

    def _slot(self, low: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return low & np.uint64(len(self._low) - 1)

    def _insert(self, low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Insert digests that differ from each other; True where a digest was not there."""
        slot = self._slot(low)
        is_new = np.zeros(len(low), dtype=bool)
        waiting = np.arange(len(low))
        while len(waiting):
            place = slot[waiting]
            is_free = (self._low[place] == 0) & (self._high[place] == 0)
            free = waiting[is_free]
            self._low[slot[free]], self._high[slot[free]] = low[free], high[free]
            # Several may have wanted one slot: whoever finds itself there has it.
            same = (self._low[place] == low[waiting]) & (self._high[place] == high[waiting])
            is_new[waiting[same & is_free]] = True
            waiting = waiting[~same]
            slot[waiting] = (slot[waiting] + np.uint64(1)) & np.uint64(len(self._low) - 1)
        return is_new

    def _grow(self) -> None:
        old_low, old_high = self._low, self._high
        self._low = np.zeros(len(old_low) * 2, dtype=np.uint64)
        self._high = np.zeros(len(old_high) * 2, dtype=np.uint64)
        # In stretches, since inserting needs several times the memory of what it inserts.
        for start in range(0, len(old_low), _MOVED_SLOTS):
            low, high = old_low[start : start + _MOVED_SLOTS], old_high[start : start + _MOVED_SLOTS]
            used = (low != 0) | (high != 0)
            self._insert(low[used], high[used])


def _halves(digests: Digests) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    words = np.ascontiguousarray(digests, dtype=np.uint8).reshape(-1, 16).view("<u8")
    return words[:, 0].copy(), words[:, 1] | np.uint64(1)  # never all zero, which marks a free slot


def _first_of_equals(low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    if not len(low):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((high, low))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (low[order][1:] != low[order][:-1]) | (high[order][1:] != high[order][:-1])
    return np.sort(order[is_first])
