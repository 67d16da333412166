"""Sizes and durations as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import InputError
from simulator.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    counted,
    format_bytes,
    format_duration,
    format_rate,
    format_seconds,
    parse_bytes,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        (0, 0),
        (17, 17),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        (" 1.5 GB ", 1_500_000_000),
        ("96GiB", 96 * 2**30),
        ("64 MB", 64_000_000),
        ("3KiB", 3072),
        ("2TiB", 2 * 2**40),
        ("512B", 512),
        ("9007199254740993", 9007199254740993),  # more than a double holds
        ("0.1GiB", 107374182),
    ],
)
def test_sizes_are_read(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "1 GiBs", "1,5GB", "1e9", "24 G iB", "0x10", "nan", "inf", "1.GB", -5, "9" * 31 + "B"],
)
def test_what_is_no_size_is_refused_by_name(text: str | int) -> None:
    with pytest.raises(InputError) as error:
        parse_bytes(text, name="--device-memory")
    assert str(error.value).startswith("--device-memory: ")
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (MIB - 1, "1.0 MiB"),  # not 1024.0 KiB
        (1.5 * GIB, "1.5 GiB"),
        (GIB - 1, "1.0 GiB"),
        (3 * TIB, "3.0 TiB"),
        (2000 * TIB, "2000.0 TiB"),
        (-2 * MIB, "-2.0 MiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit(num_bytes: float, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 µs"),
        (4.1e-6, "4.1 µs"),
        (0.0123, "12.3 ms"),
        (1.0, "1 s"),
        (6.502, "6.5 s"),
        (0.9996, "1 s"),  # not 1e+03 ms
        (0.9994, "999 ms"),
        (0.00099951, "1 ms"),
        (1234.0, "1234 s"),  # not 1.23e+03 s
        (86400.0, "86400 s"),
        (-0.25, "-250 ms"),
    ],
)
def test_durations_are_written_with_three_digits_and_no_exponent(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (7.25, "7.25 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (7180.0, "2 h 0 min"),
        (7169.0, "119 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_long_durations_are_written_in_minutes_and_hours(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


@given(st.integers(0, 2**60))
def test_a_written_size_reads_back_to_within_its_last_digit(num_bytes: int) -> None:
    # 0.05 of a unit that is at most as large as the size itself.
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.051, abs=0.5)


@given(st.integers(0, 2**70))
def test_whole_numbers_are_exact(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == parse_bytes(f"{num_bytes}B") == num_bytes


@given(st.floats(-1e6, 1e6, allow_nan=False))
def test_a_written_duration_has_no_exponent(seconds: float) -> None:
    text = format_seconds(seconds)
    assert "e" not in text
    number, unit = text.split()
    assert float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=0.006, abs=1e-9)


@pytest.mark.parametrize(
    ("per_second", "expected"), [(0.5, "0.5"), (37.46, "37.5"), (99.96, "100"), (6398.2, "6,398"), (1.2e5, "120,000")]
)
def test_rates_are_written_without_an_exponent(per_second: float, expected: str) -> None:
    assert format_rate(per_second) == expected


@pytest.mark.parametrize(("count", "expected"), [(0, "0 files"), (1, "1 file"), (1912, "1,912 files")])
def test_counts_agree_with_their_noun(count: int, expected: str) -> None:
    assert counted(count, "file") == expected
