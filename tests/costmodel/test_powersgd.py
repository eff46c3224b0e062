"""What PyTorch's PowerSGD hook makes of gradients: which it compresses, what it sends of a bucket, and what it keeps."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.trace import TensorInfo
from dpro_search.costmodel.powersgd import COMPRESSIONS, RANKS, factor_elements, features, kept_bytes, low_rank
from tests.every_case import every_case


def gradients(*shapes: tuple[int, ...]) -> list[TensorInfo]:
    return [
        TensorInfo(name=f"g{i}", node="", dtype="float32", shape=shape, size_bytes=4 * math.prod(shape))
        for i, shape in enumerate(shapes)
    ]


@every_case(
    ("shape", "rank", "elements"),
    [
        ((100, 300), 1, (100, 300)),
        ((100, 300), 4, (400, 1200)),
        ((64, 32, 3, 3), 2, (128, 576)),  # a convolution is a matrix with a row for each of what it gives
        ((3, 1000), 4, None),  # its factors, of rank 3, are larger than itself
        ((20, 100), 4, (80, 400)),
        ((10, 20), 4, None),  # 120 elements in place of 200 are not worth it
        ((1000,), 1, None),  # vectors go as they are
        ((), 1, None),
        ((0, 5), 1, None),
    ],
)
def test_a_gradient_is_compressed_where_its_factors_are_less_than_half_as_large(shape, rank, elements):
    assert factor_elements(gradients(shape)[0], rank) == elements


def test_a_bucket_sends_what_is_not_compressed_then_ps_then_qs():
    compressed = low_rank(gradients((100, 300), (100,), (64, 32, 3, 3), (50,)), np.array([0, 0, 1, 2]), 2)
    assert compressed.sent_bytes.tolist() == [[400, 800, 2400], [0, 4 * 128, 4 * 576], [200, 0, 0]]


def test_two_copies_of_the_largest_bucket_and_room_for_what_is_left_over_of_each_are_kept():
    tensors, bucket_of = gradients((100, 300), (100,), (400, 300)), np.array([0, 0, 1])
    assert kept_bytes(tensors, bucket_of, 1) == 2 * (120_400 + 480_000) + 4 * (400 + 700) + 2 * 480_000


shapes = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12)


@given(shapes, st.sampled_from(RANKS))
def test_nothing_is_sent_twice_and_compute_takes_time(sizes, rank):
    tensors, bucket_of = gradients(*sizes), np.arange(len(sizes)) // 3
    compressed, whole = low_rank(tensors, bucket_of, rank), np.bincount(bucket_of, weights=[t.size_bytes for t in tensors])
    assert (compressed.sent_bytes.sum(axis=1) <= whole).all()
    assert (compressed.stages_us >= 0).all()
    assert (compressed.stages_us.sum(axis=1) > 0).all()
    assert features(tensors, bucket_of, rank)[:, 3:5].sum() == whole.sum()


@given(shapes)
def test_a_lower_rank_sends_less_of_what_a_higher_one_compresses(sizes):
    tensors, bucket_of = gradients(*sizes), np.zeros(len(sizes), dtype=np.int64)
    sent = [low_rank(tensors, bucket_of, rank).sent_bytes.sum() for rank in sorted(RANKS)]
    assert sent == sorted(sent)


def test_buckets_in_fresh_memory_take_longer_by_the_byte():
    small, large = (low_rank(gradients((rows, 4000)), np.zeros(1, dtype=np.int64), 1).stages_us.sum() for rows in (1000, 4000))
    assert large > 1.5 * 4 * small


def test_compressions_are_named_by_their_rank():
    assert COMPRESSIONS == {"powersgd-4": 4, "powersgd-2": 2, "powersgd-1": 1}
