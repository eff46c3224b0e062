"""Jobs with parameter servers as graphs: where slices go, what an iteration takes, what changes do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.assemble.kvstore_slices import Slicing
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay import replay
from dpro_search.space.servers.kvstore_job import (
    KvstoreJob,
    PushCompression,
    kvstore_graph,
    process_loads,
    store_bytes_per_us,
)
from dpro_search.space.servers.store_job import goodput_bytes_per_us
from tests.every_case import every_case
from tests.store_jobs import MIB, kvstore_job, layers_of


def job(sizes, *, servers=1, bound=10**9, slice_threshold=None, **fields) -> KvstoreJob:
    slicing = Slicing(servers=servers, bound=bound, priority=slice_threshold is not None, slice_threshold=slice_threshold or 40_000)
    return kvstore_job(sizes, servers=servers, **({"slicing": slicing} | fields))


def iteration_us(job: KvstoreJob) -> float:
    return replay(kvstore_graph(job)).iteration_us


def test_a_tensor_below_the_bound_goes_to_the_server_of_its_key():
    spread = job([400] * 5, servers=3, bound=101)
    assert spread.slices == [[(tensor * 9973 % 3, 400.0)] for tensor in range(5)]


def test_a_tensor_at_the_bound_is_cut_evenly_over_all_servers():
    cut = job([400], servers=3, bound=100).slices[0]
    assert [server for server, _ in cut] == [0, 1, 2]
    assert sum(size for _, size in cut) == 400
    assert max(size for _, size in cut) - min(size for _, size in cut) <= 4


def test_without_communication_an_iteration_is_its_compute():
    assert iteration_us(job([MIB])) == pytest.approx(20_000)


def test_one_tensor_is_pushed_by_all_workers_into_one_link_and_pulled_out_of_it():
    size, rate = 8 * MIB, 125.0
    assert iteration_us(job([size], bytes_per_us=rate)) == pytest.approx(20_000 + 2 * 2 * size / rate, rel=1e-6)


def test_two_servers_share_what_is_cut():
    size, rate = 8 * MIB, 125.0
    assert iteration_us(job([size], servers=2, bound=1, bytes_per_us=rate)) == pytest.approx(20_000 + 2 * size / rate, rel=1e-6)


def test_a_bound_that_cuts_nothing_leaves_large_tensors_on_one_server():
    sizes = [4 * MIB] * 3
    cut, whole = (job(sizes, servers=2, bound=bound, bytes_per_us=125.0) for bound in (1, 10**9))
    assert iteration_us(cut) < iteration_us(whole)


def test_communication_hides_behind_the_layers_that_are_still_computed():
    small = [400] * 3
    late, early = (job(sizes, bytes_per_us=1250.0) for sizes in ([4 * MIB, *small], [*small, 4 * MIB]))
    assert iteration_us(early) < 0.95 * iteration_us(late)  # the last layer's gradient comes first


def test_a_server_on_a_worker_s_core_takes_time_from_it():
    busy = job([MIB], copy_us_per_byte=0.005, sum_us_per_byte=0.005, update_us_per_byte=0.005)
    apart, together = busy, replace(busy, server_core=(0,))
    assert iteration_us(together) >= iteration_us(apart)
    cost = 20_000 + 3 * 0.005 * MIB
    assert iteration_us(together) == pytest.approx(cost, rel=0.01)


def test_each_slice_costs_the_server_something_whatever_its_size():
    few, many = (job([4 * MIB / count] * count, slice_us=5000.0) for count in (1, 16))
    assert iteration_us(many) > iteration_us(few)


def test_with_priority_slices_workers_call_the_optimizer_in_place_of_servers():
    plain = job([MIB, MIB], slice_us=7.0, update_call_us=5.0, worker_call_us=2.0)
    adding = replace(plain, slicing=replace(plain.slicing, priority=True))
    slices = sum(map(len, adding.slices))
    core_us = 2 * 20_000 + slices * 7.0 + 2 * 2 * 2.0
    assert sum(load.core_us for load in process_loads(adding)) == pytest.approx(core_us)
    assert kvstore_graph(adding).duration_us.sum() == pytest.approx(core_us)


def test_all_core_time_is_kept():
    one = job(
        [MIB, MIB],
        comm_us_per_byte=0.001,
        beside_us_per_byte=(0.004, 0.005),
        copy_us_per_byte=0.001,
        sum_us_per_byte=0.002,
        update_us_per_byte=0.003,
        slice_us=7.0,
        update_call_us=5.0,
    )
    core_us = kvstore_graph(one).duration_us.sum()
    messages = 2 * 2 * 2 * MIB  # of two workers, both ways
    server = 2 * MIB * (0.001 + 0.002 + 0.003) + 2 * (7.0 + 5.0)
    assert core_us == pytest.approx(2 * 20_000 + messages * 2 * 0.001 + 2 * MIB * (0.004 + 0.005) + server)
    assert core_us == pytest.approx(sum(load.core_us for load in process_loads(one)))


def test_a_step_is_as_long_as_its_slowest_worker_needs_where_processors_are_the_limit():
    mean = job([MIB], copy_us_per_byte=0.005)
    slowest = replace(mean, slowest=1.1)
    assert iteration_us(slowest) == pytest.approx(1.1 * iteration_us(mean))
    assert process_loads(slowest) == process_loads(mean)  # means, as they were recorded
    slow_link = job([400] * 4, bytes_per_us=0.002)
    assert iteration_us(replace(slow_link, slowest=1.1)) < 1.01 * iteration_us(slow_link)


def test_with_priority_slices_the_servers_only_add_and_every_worker_updates():
    one = job([MIB, MIB], slice_threshold=MIB, copy_us_per_byte=0.001, sum_us_per_byte=0.002, update_us_per_byte=0.003)
    graph = kvstore_graph(one)
    by_kind = {kind: graph.duration_us[graph.op_kind == kind].sum() for kind in (OpKind.SERVER, OpKind.UPDATE)}
    assert by_kind[OpKind.SERVER] == pytest.approx(2 * MIB * (0.001 + 0.002 + 0.001))
    assert by_kind[OpKind.UPDATE] == pytest.approx(2 * 2 * MIB * 0.003)


def test_a_worker_updates_a_group_when_all_of_it_is_back():
    graph = kvstore_graph(job([MIB, MIB, MIB], slice_threshold=MIB, updates=((0, 1), (2,))))
    updates = np.flatnonzero(graph.op_kind == OpKind.UPDATE)
    assert np.diff(graph.pred_ptr)[updates].tolist() == [2, 1, 2, 1]  # of two workers


def test_slices_spread_what_the_bound_leaves_on_one_server():
    sizes = [4 * MIB] * 3
    whole, sliced = (job(sizes, servers=2, bytes_per_us=125.0, **how) for how in ({}, {"slice_threshold": 100_000}))
    assert iteration_us(sliced) < iteration_us(whole)
    assert sliced.server_bytes == pytest.approx([6 * MIB, 6 * MIB], rel=0.05)


def test_the_load_of_a_link_is_the_bytes_of_all_workers():
    loads = process_loads(job([MIB], bytes_per_us=100.0))
    assert [load.sent_bytes for load in loads] == [MIB, MIB, 2 * MIB]
    assert loads[2].link_us == pytest.approx(2 * MIB / 100)


TWO_BIT = PushCompression(share=1 / 16, quantize_us_per_byte=2e-3, dequantize_us_per_byte=3e-3)


def test_compressed_pushes_are_smaller_and_pulls_are_not():
    plain, small = (process_loads(job([MIB], compression=compression, bytes_per_us=100.0)) for compression in (None, TWO_BIT))
    assert [load.sent_bytes for load in small[:2]] == [load.sent_bytes / 16 for load in plain[:2]]
    assert [load.received_bytes for load in small[:2]] == [load.received_bytes for load in plain[:2]]
    assert (small[2].sent_bytes, small[2].received_bytes) == (plain[2].sent_bytes, plain[2].received_bytes / 16)


def test_workers_quantize_and_servers_dequantize_every_part():
    costs = {"copy_us_per_byte": 1e-3, "sum_us_per_byte": 1e-3, "update_us_per_byte": 1e-3}
    plain, small = (kvstore_graph(job([MIB, 4 * MIB], compression=compression, **costs)) for compression in (None, TWO_BIT))
    more_us = small.duration_us.sum() - plain.duration_us.sum()
    # Two workers quantize, the server dequantizes two parts, one of them in place of a copy.
    assert more_us == pytest.approx(5 * MIB * (2 * 2e-3 + 2 * 3e-3 - 1e-3))
    used_us = sum(load.core_us for load in process_loads(job([MIB, 4 * MIB], compression=TWO_BIT, **costs)))
    assert small.duration_us.sum() == pytest.approx(used_us)


@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=6), st.integers(1, 3), st.integers(100, 10**5))
@settings(max_examples=20, deadline=None)
def test_free_compression_makes_no_iteration_longer(elements, servers, bound):
    sizes = [4 * count for count in elements]
    free = PushCompression(share=1 / 16, quantize_us_per_byte=0.0, dequantize_us_per_byte=0.0)
    plain, small = (job(sizes, servers=servers, bound=bound, bytes_per_us=100.0, compression=kind) for kind in (None, free))
    assert iteration_us(small) <= iteration_us(plain) * 1.05


def test_what_a_worker_exchanges_with_the_server_on_its_host_crosses_no_link():
    alone = job([MIB], workers=1, bytes_per_us=0.1, server_host=(0,))
    assert iteration_us(alone) == pytest.approx(20_000)
    assert kvstore_graph(alone).flow_bytes.sum() == 0
    assert [(load.sent_bytes, load.link_us) for load in process_loads(alone)] == [(0, 0), (0, 0)]


def test_half_of_the_bytes_stay_on_the_hosts_of_two_workers_with_a_server_each():
    """Of a tensor cut in two, each worker sends one part away, and each server answers one worker away: a whole tensor a link."""
    size, rate = 8 * MIB, 125.0
    apart, together = (job([size], servers=2, bound=1, bytes_per_us=rate, server_host=hosts) for hosts in ((2, 3), (1, 0)))
    assert kvstore_graph(apart).flow_bytes.sum() == 4 * size
    assert kvstore_graph(together).flow_bytes.sum() == 2 * size
    assert [load.sent_bytes for load in process_loads(together)] == [size / 2] * 4
    assert {load.link_us for load in process_loads(together)} == {size / rate}, "a worker's bytes and its server's"
    assert iteration_us(together) == pytest.approx(20_000 + size / rate, rel=1e-6), "half to push, and then half to pull"


def test_the_link_of_a_host_with_a_worker_and_a_server_carries_what_both_send():
    size, rate = 8 * MIB, 125.0
    one = job([size], bytes_per_us=rate, server_host=(0,))
    loads = process_loads(one)
    assert [load.sent_bytes for load in loads] == [0, size, size]
    assert [load.link_us for load in loads] == [size / rate] * 3
    assert iteration_us(one) == pytest.approx(20_000 + 2 * size / rate, rel=1e-6), "one worker's gradient in, and its weights out"


def test_processes_of_one_host_share_its_link_with_those_of_others():
    """Three workers: the server's host takes in two gradients, one after the other over its link, and sends two answers."""
    size, rate = 8 * MIB, 125.0
    one = job([size], workers=3, bytes_per_us=rate, server_host=(2,))
    assert iteration_us(one) == pytest.approx(20_000 + 2 * 2 * size / rate, rel=1e-6)


def test_core_time_is_the_same_wherever_servers_are():
    costs = {"comm_us_per_byte": 0.001, "copy_us_per_byte": 0.001, "slice_us": 7.0, "bytes_per_us": 125.0}
    apart, together = (job([MIB, MIB], servers=2, bound=1, server_host=hosts, **costs) for hosts in ((), (0, 1)))
    assert kvstore_graph(together).duration_us.sum() == pytest.approx(kvstore_graph(apart).duration_us.sum())
    assert [load.core_us for load in process_loads(together)] == [load.core_us for load in process_loads(apart)]


def test_hosts_of_their_own_are_what_servers_have_by_default():
    named, unnamed = (job([MIB, 400], servers=2, bound=1000, bytes_per_us=125.0, server_host=hosts) for hosts in ((2, 3), ()))
    assert process_loads(named) == process_loads(unnamed)
    assert iteration_us(named) == iteration_us(unnamed)


@given(server_host=st.lists(st.integers(0, 4), min_size=1, max_size=4), sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_links_carry_what_the_loads_say_wherever_servers_are(server_host, sizes):
    placed = job(
        [4000 * size for size in sizes],
        workers=3,
        servers=len(server_host),
        bound=20_000,
        bytes_per_us=125.0,
        server_host=tuple(server_host),
    )
    graph = kvstore_graph(placed)
    graph.validate()
    carried = np.zeros(len(graph.link_bytes_per_us))
    np.add.at(carried, graph.link_idx, np.repeat(graph.flow_bytes, np.diff(graph.link_ptr)))
    loads = process_loads(placed)
    assert carried.sum() == pytest.approx(sum(load.sent_bytes + load.received_bytes for load in loads))
    assert carried.max() / 125.0 == pytest.approx(max(load.link_us for load in loads))


def test_the_graph_is_valid():
    kvstore_graph(job([MIB, 400], servers=2, bound=1000, bytes_per_us=100.0, compression=TWO_BIT)).validate()
    kvstore_graph(job([MIB, 400, 3 * MIB], workers=3, servers=2, bound=1000, bytes_per_us=100.0)).validate()


def test_goodput_is_below_the_rate_and_no_limit_stays_none():
    assert goodput_bytes_per_us(None) is None
    rate = goodput_bytes_per_us(8e6)
    assert rate is not None
    assert 0.9 < rate < 1
    both_ways = store_bytes_per_us(8e6)
    assert both_ways is not None
    assert both_ways < rate


@pytest.mark.parametrize(
    "wrong",
    [{"server_host": (0, 1)}, {"server_host": (-1,)}, {"servers": 0}, {"bound": 0}, {"slice_threshold": -1}, {"bytes_per_us": 0.0}],
)
def test_jobs_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError, match=r"a job .*needs"):
        job([MIB], **wrong)


def unlike_workers(workers: int, **fields) -> KvstoreJob:
    """Workers of two speeds in turn, several tensors, and servers whose work on a message costs core time."""
    sizes = [3 * MIB, MIB, 5 * MIB, MIB, 2 * MIB, 4 * MIB]
    slow, fast = (layers_of([us] * 6, [us * 2] * 6) for us in (3_000, 2_500))
    costs = {"comm_us_per_byte": 1e-4, "copy_us_per_byte": 1e-4, "sum_us_per_byte": 2e-4, "update_us_per_byte": 2e-4}
    recorded = job(sizes, servers=2, bound=MIB // 2, **costs, **fields)
    return replace(recorded, workers=(slow, fast)).with_workers(workers)


@every_case("workers", [18, 20, 33, 40])
@every_case("bytes_per_us", [60.0, 1_000.0, None])
@every_case("server_host", [(), (1, 0)], ids=["own hosts", "workers' hosts"])
def test_folded_workers_take_what_all_workers_take(workers, bytes_per_us, server_host):
    whole = unlike_workers(workers, bytes_per_us=bytes_per_us, server_host=server_host)
    folded = whole.folded(8)
    assert len(folded.workers) <= 8 + 2
    assert iteration_us(folded) == pytest.approx(iteration_us(whole), rel=0.04)


def test_folded_workers_that_share_hosts_take_what_all_workers_take():
    whole = unlike_workers(2, bytes_per_us=250.0).with_workers(32, 8)
    assert iteration_us(whole.folded(8)) == pytest.approx(iteration_us(whole), rel=0.04)


def test_a_job_of_thousands_of_hosts_is_replayed_as_few_workers():
    folded = unlike_workers(2, bytes_per_us=1_000.0).with_workers(16_384, 8).folded(8)
    assert len(folded.workers) == 8
    assert sum(folded.classes.members) == 16_384
    assert folded.copies[:8].sum() == pytest.approx(16_384)


def test_few_workers_and_those_that_a_question_is_about_are_not_folded():
    assert unlike_workers(16).folded(8).classes is None
    apart = unlike_workers(32).folded(8, apart=(5,)).classes
    assert dict(zip(apart.number, apart.members, strict=True))[5] == 1


def test_the_slowest_worker_of_a_class_counts():
    classes = unlike_workers(32).folded(8).classes
    factors = np.ones((3, 32))
    factors[1, 4] = 2.0
    slowest = classes.slowest(factors)
    assert slowest[1, classes.class_of_worker[4]] == 2.0
    assert slowest.sum() == slowest.size + 1
