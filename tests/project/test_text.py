"""Figures in words."""

from loops import given

from pmm3d.text import in_bytes, names_in_words

SIZES = [
    (0, "0 B"), (12, "12 B"), (1023, "1,023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (20 * 2**20 + 2**19, "20.5 MiB"),
    (1000 * 2**20, "1,000 MiB"), (2**31, "2 GiB"), (123.4 * 2**30, "123 GiB"), (5e15, "4,547 TiB"), (-2048, "-2 KiB"),
]


def test_bytes_have_three_digits():
    for nbytes, words in SIZES:
        with given(nbytes=nbytes, words=words):
            assert in_bytes(nbytes) == words


def test_a_few_names_stand_for_many():
    assert names_in_words("aabcde") == "a, b, c, d and 1 more"
    assert names_in_words("aabc") == "a, b, c" and names_in_words([]) == ""
