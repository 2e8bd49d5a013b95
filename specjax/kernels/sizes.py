"""Sizes of tiles."""


def power(n: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << (n - 1).bit_length())


def divisor(size: int, tile: int) -> int:
    """``tile``, a power of two, halved until it divides ``size``."""
    while size % tile:
        tile //= 2
    return tile
