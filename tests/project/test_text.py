"""Figures in words."""

from loops import looped

from pmm3d.text import in_bytes, in_time, names_in_words

SIZES = [
    (0, "0 B"),
    (12, "12 B"),
    (1023, "1,023 B"),
    (1024, "1 KiB"),
    (1536, "1.5 KiB"),
    (20 * 2**20 + 2**19, "20.5 MiB"),
    (1000 * 2**20, "1,000 MiB"),
    (2**31, "2 GiB"),
    (123.4 * 2**30, "123 GiB"),
    (5e15, "4,547 TiB"),
    (-2048, "-2 KiB"),
]


@looped("nbytes, words", SIZES)
def test_bytes_have_three_digits(nbytes, words):
    assert in_bytes(nbytes) == words


def test_a_few_names_stand_for_many():
    assert names_in_words("aabcde") == "a, b, c, d and 1 more"
    assert names_in_words("aabc") == "a, b, c" and names_in_words([]) == ""


@looped(
    "seconds, words",
    [
        (0.0, "0 s"),
        (2.5e-6, "2.5 µs"),
        (0.9996e-3, "1 ms"),
        (0.031, "31 ms"),
        (0.9996, "1 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (121.0, "2 min 1 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h"),
        (9000.0, "2 h 30 min"),
        (2 * 86400.0, "2 days"),
        (1e9, "1.16e+04 days"),
    ],
)
def test_times_have_three_digits_or_two_units(seconds, words):
    assert in_time(seconds) == words
