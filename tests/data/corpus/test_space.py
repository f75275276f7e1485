"""How much room a build needs, before, while and after the rows are read."""

from tunewell.data.corpus.assembly import SpaceEstimate

REST = 8 << 20


def test_before_the_first_row_the_need_is_guessed_from_the_sources():
    """A full disk at the first byte must still say how much to free."""
    assert SpaceEstimate(source_bytes=3_000_000).bytes_for_retry() == 18_000_000 + REST


def test_while_reading_the_need_follows_the_tokens_seen_so_far():
    """Half of the rows read: the other half goes to the cache, all of it through staging into shards."""
    space = SpaceEstimate(source_bytes=1_000, read_bytes=500, tokens=100)
    assert space.bytes_for_retry() == 100 * 5 + 200 * 13 + REST


def test_more_bytes_read_than_the_sources_have_is_no_negative_need():
    """Out of a compressed file come more bytes than it has."""
    assert SpaceEstimate(source_bytes=1_000, read_bytes=4_000, tokens=100).bytes_for_retry() == 1_300 + REST


def test_after_reading_everything_is_cached_and_only_the_rest_is_written_again():
    """An id and a label, four bytes each, are what the shards take."""
    space = SpaceEstimate(1_000, 1_000, tokens=100, is_read=True)
    assert space.shard_bytes() == 800
    assert space.bytes_for_retry() == 1_300 + REST
