"""How much room on the disk a build needs."""

from dataclasses import dataclass

from tunewell.data.corpus.writer import BYTES_PER_TOKEN

_SOURCE_BYTES_PER_TOKEN = 3
"""A low guess, for the time before the first token is known: English chat has about four."""
_CACHED_BYTES = 5
"""Of a token in a part: its id and a little more."""
_STAGED_BYTES = 5
"""Of a token between reading and packing: its id and its mask."""
_REST_BYTES = 8 << 20
"""Of all else: tokenizer, index, card."""


@dataclass
class Space:
    """What was read so far, and what that says about the whole."""

    source_bytes: int
    read_bytes: int = 0
    tokens: int = 0
    is_read: bool = False

    def shard_bytes(self) -> int:
        """Give the size of all shards, once every token is known."""
        return self.tokens * BYTES_PER_TOKEN

    def bytes_for_another_try(self) -> int:
        """Estimate what a run would write now: parts that are not there yet, staged tokens, shards and the rest."""
        total = float(self.tokens)
        if not self.is_read:
            share_read = self.read_bytes / self.source_bytes if self.source_bytes else 1.0
            guess = self.source_bytes / _SOURCE_BYTES_PER_TOKEN
            total = max(self.tokens / share_read if self.tokens else guess, total)
        cached = (total - self.tokens) * _CACHED_BYTES
        return int(cached + total * (_STAGED_BYTES + BYTES_PER_TOKEN)) + _REST_BYTES
