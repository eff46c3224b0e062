"""What a framework does beside the strategy: host time, overlap, accumulation; and what scales and domains say of a step."""

from dataclasses import replace

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.parallel.costs.domain import Domain, domain_of
from dpro_search.parallel.costs.scales import MEASURED, Scales
from dpro_search.parallel.model import published
from dpro_search.parallel.runtime import HostTimes, Runtime
from dpro_search.parallel.steps.step_prices import step_costs, step_us
from dpro_search.parallel.strategy import Strategy
from dpro_search.parallel.workload import Workload
from tests.every_case import every_case


def workload(model="llama3-8b", cluster="2xhgx-h100", sequence=4096, runtime=None, **degrees):
    strategy = Strategy(**{"global_batch": 64, **degrees})
    chosen = parse_cluster(cluster)
    return Workload(
        model=published(model), sequence=sequence, strategy=strategy, cluster=chosen, runtime=runtime or Runtime(name="test")
    )


def layer(job):
    return step_costs(job).stages[0][1]


SMALL = {"tp": 8, "dp": 2, "sequence_parallel": True, "sequence": 256}  # too small to keep a device busy


def test_small_layers_take_what_the_host_takes_to_start_their_kernels_and_collectives():
    host = HostTimes(forward_us=100.0, backward_us=50.0, collective_us=70.0, layer_us=30.0)
    costs_of_layer = layer(workload(runtime=Runtime(host=host), **SMALL))
    # Two norms, queries-keys-values, rotation, attention, output, two sums, up, activation, down; four collectives.
    assert costs_of_layer.forward_us == pytest.approx(30 + 11 * 100 + 4 * 70)


def test_a_check_of_each_collective_takes_as_long_as_the_group_has_ranks():
    plain, checked = (layer(workload(runtime=Runtime(host=HostTimes(check_rank_us=us)), **SMALL)) for us in (0.0, 240.0))
    assert checked.forward_us - plain.forward_us == pytest.approx(4 * 8 * 240)


def test_sums_of_gradients_in_buckets_are_checked_one_by_one():
    """Layers of Llama 3 8B have 0.87 GB of gradients in fp32, so several buckets of 25 MiB each."""
    jobs = [
        workload(dp=16, runtime=Runtime(host=HostTimes(check_rank_us=us), bucket_bytes=25 * 2.0**20, overlap_gradients=False))
        for us in (0.0, 10.0)
    ]
    reduces_us = [sum(block.reduce_us for block in step_costs(job).stages[0]) for job in jobs]
    buckets = (reduces_us[1] - reduces_us[0]) / (16 * 10.0)
    assert buckets == pytest.approx(round(buckets))
    assert buckets > 32


def test_split_gradients_that_are_reduced_after_the_last_pass_lengthen_the_step():
    runtimes = [Runtime(overlap_split_gradients=beside, overlap_gathers=False) for beside in (True, False)]
    for stage in (0, 1):
        beside_us, after_us = (step_us(workload(dp=16, global_batch=16, zero_stage=stage, runtime=one)) for one in runtimes)
        assert after_us > 1.01 * beside_us if stage else after_us == beside_us


def test_large_layers_do_not_wait_for_the_host():
    slow, fast = (Runtime(host=HostTimes(forward_us=us, backward_us=us)) for us in (85.0, 1.0))
    big = {"dp": 16, "micro_batch": 4, "sequence": 8192}
    assert layer(workload(runtime=slow, **big)) == layer(workload(runtime=fast, **big))


def test_graphs_of_kernels_free_small_layers_of_the_host():
    graphs = Runtime(host=HostTimes(forward_us=2.0, backward_us=2.0, collective_us=5.0))
    assert step_us(workload(runtime=graphs, **SMALL)) < 0.5 * step_us(workload(**SMALL))


def test_tensor_parallel_collectives_hide_behind_matmuls_in_the_backward_pass_but_not_below_either():
    beside, alone = (
        layer(workload(tp=8, dp=2, sequence_parallel=True, micro_batch=4, runtime=Runtime(overlap_tensor=overlap)))
        for overlap in (True, False)
    )
    assert beside.forward_us == alone.forward_us
    assert 0.7 * alone.backward_us < beside.backward_us < alone.backward_us


def test_parameters_that_are_gathered_after_the_update_lengthen_the_step():
    """By the whole gather, less its first layer and what compute loses beside the others."""
    jobs = [workload(dp=16, zero_stage=1, runtime=Runtime(overlap_gathers=overlap)) for overlap in (True, False)]
    gather_us = sum(block.gather_us for block in step_costs(jobs[0]).stages[0])
    added_us = step_us(jobs[1]) - step_us(jobs[0])
    assert 0.7 * gather_us < added_us < gather_us


def test_gradients_are_added_once_a_micro_batch():
    more, none = (layer(workload(dp=16, runtime=Runtime(accumulate_bytes=count))) for count in (10.0, 0.0))
    parameters = 218_112_000  # of a layer of Llama 3 8B
    assert more.backward_us - none.backward_us == pytest.approx(10 * parameters / (3.35e12 * 0.85) * 1e6, rel=0.05)


@every_case("name", MEASURED)
def test_a_part_that_takes_longer_never_makes_a_step_faster_and_some_step_slower(name):
    checked = Runtime(host=HostTimes(check_rank_us=240.0))
    jobs = (
        workload(dp=16, zero_stage=1),
        workload(tp=8, dp=2, sequence_parallel=True),
        workload(tp=8, dp=2, sequence_parallel=True, sequence=128, runtime=checked),
    )
    slower = Scales(**{name: 1.5})
    added = [step_us(replace(job, scales=slower)) - step_us(job) for job in jobs]
    assert min(added) >= 0
    assert max(added) > 0


@pytest.mark.parametrize(
    ("domain", "job"),
    [
        (Domain.TENSOR_BETWEEN_HOSTS, {"tp": 16, "model": "llama2-7b"}),
        (Domain.EXPERTS, {"dp": 16, "model": "mixtral-8x7b", "ep": 8}),
        (Domain.HOST, SMALL),
        (Domain.PIPELINE_BETWEEN_HOSTS, {"tp": 8, "pp": 2, "sequence_parallel": True, "micro_batch": 8}),
        (Domain.DEVICE, {"dp": 16}),
    ],
)
def test_domains_name_what_decides_a_steps_error(domain, job):
    assert domain_of(workload(**job)) is domain
