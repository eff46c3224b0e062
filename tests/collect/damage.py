"""Damaged files, for readers that must refuse them with an error of their own or read what is left."""

from hypothesis import strategies as st


def damaged_copies(whole: bytes, *, largest: int = 255) -> st.SearchStrategy[bytes]:
    """A file with one to eight bytes set to other values, up to the `largest` one."""
    flips = st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, largest)), min_size=1, max_size=8)
    return flips.map(lambda some: _with(whole, some))


def _with(whole: bytes, flips: list[tuple[int, int]]) -> bytes:
    changed_copy = bytearray(whole)
    for position, value in flips:
        changed_copy[position] = value
    return bytes(changed_copy)
