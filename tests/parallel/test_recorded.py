"""Recorded times stand where something was recorded; elsewhere they are scaled by what a cost model says of both."""

import pytest

from dpro_search.collect.tables.parallel_times import BlockTime, CollectiveTime, ParallelTimes, UpdateTime
from dpro_search.costmodel.collectives.nccl import Placement
from dpro_search.errors import InputError
from dpro_search.parallel.costs.recorded import BlockCut, ModelledWork, PassWork, RankWork, RecordedTimes

WHOLE = BlockCut(tp=1, sequence_parallel=False, micro_batch=4, sequence=128, sharded=False)
HALF = BlockCut(tp=2, sequence_parallel=False, micro_batch=4, sequence=128, sharded=False)
PAIR = Placement(ranks_per_node=1, nodes=2)


def block(cut=WHOLE, **times):
    values = {"forward_us": 100.0, "backward_us": 200.0, "reduce_us": 10.0, **times}
    return BlockTime(
        block="layer",
        tp=cut.tp,
        sequence_parallel=cut.sequence_parallel,
        micro_batch=cut.micro_batch,
        sequence=cut.sequence,
        sharded=cut.sharded,
        **values,
    )


def exchange(size_bytes, us, **values):
    fixed = {"collective": "all_reduce", "ranks_per_host": 1, "hosts": 2, "world": 2, "rate_bps": 1e9}
    return CollectiveTime(size_bytes=size_bytes, us=us, **{**fixed, **values})


def recorded(world=2, **rows):
    return RecordedTimes(ParallelTimes(**rows), 1e9, world)


def by_degree(cut):
    """A cost model of work that tensor parallel ranks share."""
    return ModelledWork(PassWork(40.0 / cut.tp), PassWork(80.0 / cut.tp), 4.0 / cut.tp)


def test_a_cut_that_was_timed_takes_its_time_whatever_the_model_says():
    assert recorded(blocks=(block(),)).block("layer", WHOLE, by_degree) == RankWork(100.0, 200.0, 10.0)


def test_another_cut_takes_the_time_of_the_nearest_in_the_models_ratio():
    far = block(BlockCut(4, False, 4, 128, False), forward_us=1.0, backward_us=1.0)
    assert recorded(blocks=(far, block())).block("layer", HALF, by_degree) == recorded(blocks=(far,)).block(
        "layer", HALF, by_degree
    )
    assert recorded(blocks=(block(),)).block("layer", HALF, by_degree) == RankWork(50.0, 100.0, 5.0)


def test_a_pass_that_waited_for_its_host_takes_what_the_host_takes_more():
    def on_gpu(cut):
        return ModelledWork(PassWork(40.0 / cut.tp, 30.0 + 15.0 * cut.tp), PassWork(160.0 / cut.tp, 20.0), 4.0 / cut.tp)

    layer_work = recorded(blocks=(block(),)).block("layer", HALF, on_gpu)
    assert layer_work.forward_us == 115.0  # 100 is more than a device needs for 40
    assert layer_work.backward_us == 100.0  # 200 is not, for 160


def test_a_pass_is_not_shorter_than_its_host_takes():
    layer_work = recorded(blocks=(block(),)).block(
        "layer", HALF, lambda cut: ModelledWork(PassWork(100.0 / cut.tp, 70.0), PassWork(200.0, 70.0))
    )
    assert layer_work.forward_us == 70.0


def test_a_block_that_was_never_timed_is_left_to_the_model():
    assert recorded(blocks=(block(),)).block("head", WHOLE, by_degree) is None


def test_exchanges_are_straight_lines_between_and_behind_the_timed_sizes():
    times = recorded(collectives=(exchange(1000, 10.0), exchange(3000, 30.0), exchange(4000, 50.0)))
    assert times.collective_us("all_reduce", PAIR, 2000) == 20.0
    assert times.collective_us("all_reduce", PAIR, 6000) == 90.0
    assert times.collective_us("all_reduce", PAIR, 10) == 10.0


def test_exchanges_of_other_groups_and_links_are_not_taken():
    times = recorded(collectives=(exchange(1000, 10.0), exchange(1000, 70.0, rate_bps=None)))
    assert times.collective_us("all_gather", PAIR, 1000) is None
    assert times.collective_us("all_reduce", Placement(ranks_per_node=1, nodes=4), 1000) is None
    assert times.collective_us("all_reduce", PAIR, 1000) == 10.0


def test_exchanges_of_jobs_with_as_many_ranks_come_first():
    rows = (exchange(1000, 10.0), exchange(1000, 25.0, world=4))
    assert recorded(collectives=rows, world=4).collective_us("all_reduce", PAIR, 1000) == 25.0
    assert recorded(collectives=rows, world=2).collective_us("all_reduce", PAIR, 1000) == 10.0


def test_updates_are_a_line_in_the_elements():
    fixed, each = recorded(updates=(UpdateTime(elements=100.0, us=7.0), UpdateTime(elements=300.0, us=11.0))).update
    assert (fixed, each) == (pytest.approx(5.0), pytest.approx(0.02))
    assert recorded(updates=(UpdateTime(elements=100.0, us=7.0),)).update == (0.0, pytest.approx(0.07))


def test_times_come_back_from_their_file_and_new_ones_replace_old_ones(tmp_path):
    path = tmp_path / "times.json"
    first = ParallelTimes(blocks=(block(),), collectives=(exchange(1000, 10.0),))
    first.save(path)
    assert ParallelTimes.load(path) == first
    again = first.with_rows(blocks=(block(forward_us=90.0), block(HALF)))
    assert [row.forward_us for row in again.blocks] == [90.0, 100.0]


@pytest.mark.parametrize("content", ["", "[]", '{"version": 2}', '{"updates": [{"elements": 1, "us": -1}]}'])
def test_a_damaged_file_of_times_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "times.json"
    path.write_text(content)
    with pytest.raises(InputError, match=str(path)) as caught:
        ParallelTimes.load(path)
    assert "\n" not in str(caught.value)
