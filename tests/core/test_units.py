"""Numbers as people read them."""

import pytest

from tunewell.core.units import count, duration, percent, size_bytes


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((1234567,), "1,234,567"),
        ((0,), "0"),
        ((-1234,), "-1,234"),
        ((1, "row"), "1 row"),
        ((2, "row"), "2 rows"),
        ((0, "reply", "replies"), "0 replies"),
    ],
)
def test_counts_are_separated_and_agree_with_their_noun(given, text):
    """`1 rows` looks like nobody cared."""
    assert count(*given) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.413, "41.3%"),
        (1.0, "100.0%"),
        (0.99999, "99.9%"),
        (0.0, "0.0%"),
        (0.00001, "under 0.1%"),
        (0.001, "0.1%"),
        (2.5, "250.0%"),
        (float("nan"), "unknown"),
    ],
)
def test_a_percentage_is_0_or_100_only_when_it_is(share, text):
    """`100.0% full` with tokens missing is a lie by rounding."""
    assert percent(share) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (4 << 20, "4.0 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (1536 << 20, "1.5 GiB"),
        (5000 << 50, "5,000.0 PiB"),
    ],
)
def test_sizes_have_binary_units(number, text):
    """Never `1,024.0 KiB`."""
    assert size_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12 ms"),
        (0.9999, "1.0 s"),
        (3.44, "3.4 s"),
        (9.97, "10 s"),
        (59.7, "1 m 00 s"),
        (75, "1 m 15 s"),
        (3599.9, "1 h 00 m"),
        (6600, "1 h 50 m"),
        (183600, "2 d 3 h"),
        (float("inf"), "unknown"),
        (-75, "-1 m 15 s"),
    ],
)
def test_times_have_two_units_and_never_60_of_one(seconds, text):
    """`1 m 60 s` is what naive rounding writes."""
    assert duration(seconds) == text
