"""Steps on clusters: more of what costs time never makes a step faster, and what a rank holds adds up."""

from dataclasses import replace

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.errors import InputError
from dpro_search.parallel.costs.scales import Scales
from dpro_search.parallel.legality import check_strategy
from dpro_search.parallel.memory.peak import peak_memory
from dpro_search.parallel.model import model, parameters_of, published
from dpro_search.parallel.runtime import Runtime
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.steps.step_graph import step_graph
from dpro_search.parallel.steps.step_prices import step_costs
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.parallel.workload import Workload
from dpro_search.replay import replay


def workload(name="llama3-8b", cluster="2xhgx-h100", sequence=4096, **degrees):
    strategy = Strategy(**{"global_batch": 64, **degrees})
    check_strategy(strategy, published(name), sequence)
    return Workload(model=published(name), sequence=sequence, strategy=strategy, cluster=parse_cluster(cluster))


def step_us(job):
    plan = job.strategy
    orders = pipeline_orders(plan.schedule, plan.pp, plan.virtual_stages, plan.micro_batches)
    return replay(step_graph(step_costs(job), orders), iterations=1).times.end_us.max()


def test_a_step_is_between_half_the_peak_and_the_peak():
    job = workload(dp=16, zero_stage=1, global_batch=256)
    flops = 6 * parameters_of(job.model) * 256 * 4096 / 16
    assert 0.4 < flops / 989.4e12 / (step_us(job) / 1e6) < 0.8


def test_tensor_parallel_over_slow_links_costs_more_than_within_a_host():
    assert step_us(workload(tp=16, sequence_parallel=True, cluster="2xp4d.24xlarge", name="llama2-7b")) > 1.5 * step_us(
        workload(tp=8, dp=2, sequence_parallel=True, cluster="2xp4d.24xlarge", name="llama2-7b")
    )


def test_recomputation_takes_time_and_saves_memory():
    kept, again = workload(dp=16, zero_stage=1), workload(dp=16, zero_stage=1, recompute=Recompute.FULL)
    assert 1.2 < step_us(again) / step_us(kept) < 1.4
    assert peak_memory(again).activations_bytes < peak_memory(kept).activations_bytes / 4


@pytest.mark.parametrize(("stage", "held"), [(0, 18), (1, 6 + 12 / 16), (2, 2 + 16 / 16), (3, 18 / 16)])
def test_zero_stages_split_what_they_name(stage, held):
    """Rajbhandari et al. 2020, figure 1, with gradients in fp32: 2 + 4 + 12 bytes a parameter on one device."""
    memory_use = peak_memory(workload(dp=16, zero_stage=stage))
    states = memory_use.weights_bytes + memory_use.gradients_bytes + memory_use.optimizer_bytes
    assert states == pytest.approx(held * parameters_of(published("llama3-8b")))


def test_the_first_rank_of_a_pipeline_holds_most_micro_batches():
    few, many = (peak_memory(workload(pp=4, dp=4, global_batch=batch)).activations_bytes for batch in (4, 64))
    assert many == pytest.approx(4 * few, rel=0.05)


def test_a_strategy_that_does_not_fit_the_cluster_is_one_line():
    with pytest.raises(InputError, match="has 16 devices, and the strategy needs 32"):
        step_costs(workload(dp=32))


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"tp": 3}, "tp 3 does not divide 32 heads: use 2"),
        ({"dp": 12}, "global_batch 64 does not divide into dp 12 x micro_batch 1: use 60"),
        ({"pp": 64}, "is more than 32 layers"),
        ({"ep": 2}, "has no experts"),
        ({"zero_stage": 4}, "zero_stage must be 0, 1, 2 or 3"),
        ({"tp": 0}, "tp must be at least 1"),
    ],
)
def test_an_illegal_strategy_names_the_nearest_legal_value(degrees, said):
    with pytest.raises(InputError, match=said):
        workload(**degrees)


def test_networks_run_data_parallel_and_gain_from_more_devices():
    def samples_per_s(devices):
        strategy = Strategy(dp=devices, micro_batch=64, global_batch=64 * devices)
        check_strategy(strategy, model("resnet50"), 1)
        job = Workload(
            model=model("resnet50"), sequence=1, strategy=strategy, cluster=parse_cluster("1xhgx-h100"), precision="fp16"
        )
        return 64 * devices / step_us(job) * 1e6

    assert 4 * samples_per_s(1) < samples_per_s(8) < 8 * samples_per_s(1)


def test_ranks_that_share_embedding_tables_hold_a_part_of_each_and_exchange_vectors():
    def memory(ep):
        strategy = Strategy(dp=2, ep=ep, micro_batch=1024, global_batch=2048)
        check_strategy(strategy, model("dlrm"), 1)
        job = Workload(model=model("dlrm"), sequence=1, strategy=strategy, cluster=parse_cluster("1xhgx-h200"), precision="fp32")
        return peak_memory(job).weights_bytes

    assert memory(2) == pytest.approx(memory(1) / 2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "degrees", "said"),
    [
        ("resnet50", {"tp": 2}, "tp 2: resnet50 is split over dp only"),
        ("resnet50", {"ep": 2, "dp": 2}, "resnet50 has no embedding tables"),
        ("dlrm", {"ep": 3, "dp": 4}, "ep 3 must divide dp = 4"),
    ],
)
def test_networks_are_split_over_data_parallel_ranks_only(name, degrees, said):
    with pytest.raises(InputError, match=said):
        check_strategy(Strategy(**{"global_batch": 64, **degrees}), model(name), 1)


def test_tokens_cross_to_a_host_once_where_the_runtime_sends_them_so():
    """DeepSeek-V3's tokens go to 8 of 256 experts, here on 2 hosts; within one host nothing changes."""
    for cluster, ep, least, most in (("2xhgx-h100", 16, 0.2, 0.8), ("1xhgx-h100", 8, 0.999, 1.001)):
        job = workload("deepseek-v3", cluster, dp=ep, ep=ep, zero_stage=1)
        exchanged_us = []
        for once in (True, False):
            changed_job = replace(job, runtime=Runtime(tokens_once_a_host=once))
            exchanged_us.append(step_us(changed_job) - step_us(replace(changed_job, scales=Scales(free=frozenset({"ep"})))))
        assert least < exchanged_us[0] / exchanged_us[1] < most


def test_all_devices_wait_for_the_slowest_of_them():
    """The largest of 1,024 normal values is 3.25 standard deviations off, that of 16 is 1.77: 2.2 % of the matmuls' time."""
    few, many = (
        step_costs(workload(cluster=f"{hosts}xhgx-h100", dp=8 * hosts, global_batch=1024)).stages[0][1].forward_us
        for hosts in (2, 128)
    )
    assert 1.01 < many / few < 1.023


def test_inputs_of_products_in_8_bits_are_gathered_in_8_bits():
    """Transformer Engine quantizes before it gathers; sums stay in 16 bits.

    Of ten exchanges of a layer six are gathers: 0.7 of the bytes are left, and all of the latency.
    """
    job = workload(tp=8, sequence_parallel=True, name="llama3-70b", cluster="1xl40s-pcie-8")
    exchanged_us = []
    for precision in ("bf16", "fp8"):
        changed_job = replace(job, precision=precision)
        exchanged_us.append(step_us(changed_job) - step_us(replace(changed_job, scales=Scales(free=frozenset({"tp"})))))
    assert 0.65 < exchanged_us[1] / exchanged_us[0] < 0.8
