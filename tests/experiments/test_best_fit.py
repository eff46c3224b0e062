"""The allocator's rules, and that it never loses or doubles a byte."""

from hypothesis import given
from hypothesis import strategies as st

from experiments.costmodel.best_fit import BestFit

MIB = 2**20


def test_a_piece_is_cut_only_if_the_rest_is_as_large():
    allocator = BestFit()
    first = allocator.take(MIB)  # of a first region of 2 MiB
    assert allocator.in_use_bytes == MIB
    allocator.give_back(first)
    allocator.take(MIB + 1)
    assert allocator.in_use_bytes == 2 * MIB


def test_sizes_are_rounded_up():
    allocator = BestFit()
    allocator.take(1)
    assert allocator.in_use_bytes == 256


def test_the_smallest_piece_that_fits_is_taken():
    allocator = BestFit()
    sizes = [300_032, 200_192, 400_128]
    held = [allocator.take(size) for pair in zip(sizes, [256] * 3, strict=True) for size in pair]
    for address in held[::2]:
        allocator.give_back(address)
    assert allocator.take(250_000) == held[0]


@given(st.lists(st.one_of(st.integers(1, 3 * MIB), st.integers(-5, -1)), max_size=60))
def test_pieces_never_overlap_and_all_come_back(wants):
    allocator, held = BestFit(), []
    for want in wants:
        if want > 0:
            address = allocator.take(want)
            end = address + want
            assert all(end <= other or address >= other_end for other, other_end in held)
            held.append((address, end))
        elif held:
            allocator.give_back(held.pop(want % len(held))[0])
        assert allocator.in_use_bytes >= sum(end - address for address, end in held)
    for address, _ in held:
        allocator.give_back(address)
    assert allocator.in_use_bytes == 0
    assert allocator.peak_bytes <= 2 * sum(want + 256 for want in wants if want > 0)
