import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nvme_offload.offload.units import GB, GiB, KiB, MiB, TiB, format_bytes, format_rate, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        (1e9, 10**9),
        ("0", 0),
        ("1048576", MiB),
        ("17B", 17),
        ("4KiB", 4 * KiB),
        ("4 KiB", 4 * KiB),
        (" 512MiB ", 512 * MiB),
        ("8GiB", 8 * GiB),
        ("2TiB", 2 * TiB),
        ("1.5GiB", 3 * GiB // 2),
        ("1kB", 1000),
        ("1KB", 1000),
        ("3MB", 3_000_000),
        ("1.5GB", 1_500_000_000),
        ("1.1GB", 1_100_000_000),  # exactly, which 1.1 * 1e9 in floating point is not
        ("1TB", 10**12),
        ("0.3KiB", 307),  # a part of a byte is dropped
    ],
)
def test_parse_bytes_accepts(text, size_bytes):
    parsed = parse_bytes(text)
    assert parsed == size_bytes
    assert type(parsed) is int


WORDS = ["", "GiB", "8G", "8gib", "8Gb", "8 GiBs", "-1GiB", "1e9", "1_000", "1,5GB", "0x10", ".5GiB", "1.GiB"]
NO_WORDS = [-1, True, False, 1.5, -2.0, float("inf"), float("nan"), None, [], b"1GiB"]


@pytest.mark.parametrize("text", [*WORDS, "\u0663GiB", *NO_WORDS])
def test_parse_bytes_refuses_and_names_value_and_forms(text):
    with pytest.raises(ValueError, match="is not a number of bytes") as caught:
        parse_bytes(text)
    assert str(caught.value).startswith(repr(text))
    assert '"8GiB", "1.5GB"' in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1 KiB"),
        (512 * MiB, "512 MiB"),
        (3 * GiB // 2, "1.5 GiB"),
        (100 * GiB, "100 GiB"),
        (2 * TiB, "2048 GiB"),
        (GB, "953.67 MiB"),
        (-2 * GiB, "-2 GiB"),
    ],
)
def test_format_bytes(size_bytes, text):
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 2**60))
@example(1152)
def test_what_format_bytes_shows_is_read_back(size_bytes):
    """To two decimals; and a part of a byte is dropped."""
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, abs=0.0051 * size_bytes + 1)


@given(st.integers(0, 2**20))
def test_whole_gib_are_read_back_exactly(num_gib):
    assert parse_bytes(format_bytes(num_gib * GiB)) == num_gib * GiB


@pytest.mark.parametrize(
    ("rate", "text"), [(0, "0.00 GB/s"), (2.314e9, "2.31 GB/s"), (GB, "1.00 GB/s"), (12_345_678, "0.0123 GB/s")]
)
def test_format_rate(rate, text):
    assert format_rate(rate) == text
