"""Intermediate results that strategies share are those that each strategy has by itself."""

from dataclasses import dataclass, fields, replace

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.collect.tables.parallel_times import BlockTime, ParallelTimes
from dpro_search.parallel.costs import pricer
from dpro_search.parallel.costs.pricer import Pricer
from dpro_search.parallel.costs.recorded import RecordedTimes
from dpro_search.parallel.memory import peak
from dpro_search.parallel.memory.peak import peak_memory
from dpro_search.parallel.model import Architecture, Attention, FeedForward, Layer
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.search.ranking import family
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import DETAILS, Recompute, Strategy
from dpro_search.parallel.workload import SharedResults, Workload

LAYER = Layer(count=8, attention=Attention(heads=8, kv_heads=8, head_dim=64), feed_forward=FeedForward(hidden=2048))
MODEL = Architecture(name="small", hidden=512, vocab=1000, layers=(LAYER,), tied=True)
PLAN = Strategy(dp=8, tp=2, pp=2, global_batch=64, zero_stage=1, micro_batch=2)
# A legal value of each field beside `PLAN`'s, with what must change beside it.
CHANGES = {
    "dp": {"dp": 4, "pp": 4},
    "tp": {"tp": 4, "dp": 4},
    "pp": {"pp": 4, "dp": 4},
    "cp": {"cp": 2, "dp": 4},
    "virtual_stages": {"virtual_stages": 2, "schedule": Schedule.INTERLEAVED},
    "stage_layers": {"stage_layers": (3, 5)},
    "zero_stage": {"zero_stage": 3},
    "dp_replicate": {"zero_stage": 3, "dp_replicate": 2},
    "sequence_parallel": {"sequence_parallel": True},
    "cp_ring": {"cp": 2, "dp": 4, "cp_ring": True},
    "cp_balanced": {"cp": 2, "dp": 4, "cp_balanced": False},
    "micro_batch": {"micro_batch": 1},
    "global_batch": {"global_batch": 128},
    "recompute": {"recompute": Recompute.FULL},
    "recompute_layers": {"recompute": Recompute.FULL, "recompute_layers": 2},
    "schedule": {"schedule": Schedule.DUAL_PIPE_V, "virtual_stages": 2},
    "reshard": {"zero_stage": 3, "reshard": False},
    "prefetch_layers": {"zero_stage": 3, "prefetch_layers": 2},
    "gradient_dtype": {"gradient_dtype": "bf16"},
    "offload_optimizer": {"offload_optimizer": True},
    "offload_activations": {"offload_activations": True},
    "cuda_graphs": {"cuda_graphs": True},
    "overlap_experts": {"overlap_experts": True},
}
OF_EXPERTS = {"ep", "etp", "expert_load"}


def workload(**values):
    return Workload(model=MODEL, sequence=256, strategy=PLAN, cluster=parse_cluster("4xhgx-h100"), **values)


def recorded():
    times = ParallelTimes(
        blocks=tuple(
            BlockTime(block="layer", micro_batch=2, sequence=256, sharded=sharded, forward_us=900, backward_us=1800, spread=0.1)
            for sharded in (False, True)
        )
    )
    return RecordedTimes(times, None, 32)


@pytest.mark.parametrize("times", [None, recorded()], ids=["modelled", "recorded"])
def test_a_strategy_is_predicted_the_same_whatever_was_predicted_before_it(times):
    shared = StepPrices(workload(times=times))
    for changes in CHANGES.values():
        strategy = replace(PLAN, **changes)
        alone = StepPrices(workload(times=times))
        assert shared.passes(strategy) == alone.passes(strategy)
        assert shared.step_us(strategy) == alone.step_us(strategy)
        assert shared.memory(strategy) == alone.memory(strategy)


def test_each_field_of_a_strategy_is_tried():
    assert {field.name for field in fields(Strategy)} == CHANGES.keys() | OF_EXPERTS


@dataclass(frozen=True, kw_only=True)
class StrategyWithNewSetting(Strategy):
    """A strategy with a setting that no module knows."""

    new_setting: int = 0


def test_a_new_setting_is_part_of_every_key():
    steps = StepPrices(workload())
    one, other = (StrategyWithNewSetting(**vars(PLAN), new_setting=value) for value in (0, 1))
    assert steps.passes(one) is steps.passes(replace(one))
    assert steps.passes(one) is not steps.passes(other)
    assert family(one) != family(other)
    keys = [Pricer(steps.workload_of(strategy)).split for strategy in (one, other)]
    assert keys[0] != keys[1]
    known = SharedResults()
    for strategy in (one, other):
        peak_memory(steps.workload_of(strategy), known)
    assert len(known.held) == 2


def test_keys_leave_out_only_settings_that_exist():
    names = {field.name for field in fields(Strategy)}
    for irrelevant in (pricer._IRRELEVANT_TO_PROGRAMS, peak._IRRELEVANT_TO_ACTIVATIONS, DETAILS):
        assert irrelevant < names
