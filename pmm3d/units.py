"""Figures and ranks in words."""

NAMED = 20


def in_bytes(nbytes: float) -> str:
    """1.5 GiB, 20 MiB, 512 KiB, 12 B: three digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if abs(nbytes) >= 100 else f"{nbytes:.3g} {unit}"


def spans(numbers) -> list[list[int]]:
    """Consecutive numbers as [first, last]: [0, 1, 2, 7] as [[0, 2], [7, 7]]."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def ranks_in_words(ranks) -> str:
    """[0, 1, 2, 7] as "ranks 0-2, 7"; [3] as "rank 3"."""
    listed = list(ranks)
    found = spans(listed)
    words = [str(first) if first == last else f"{first}-{last}" for first, last in found[:NAMED]]
    more = " and more" if len(found) > NAMED else ""
    return f"rank{'s' * (len(listed) != 1)} {', '.join(words)}{more}"
