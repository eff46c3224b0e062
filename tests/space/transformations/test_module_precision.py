"""Precision by module: which modules, what bfloat16 takes of their time and what casts add; on a real recording of three blocks."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.modules import LoweredOp, LoweredOps, ModuleInfo
from dpro_search.costmodel.precision import BUNDLED_TABLE, BUNDLED_TORCH_TABLE, named_model
from dpro_search.errors import InputError
from dpro_search.graph.ddp import DdpGraph
from dpro_search.kinds import JobInScenario, PlanOptions, job_of
from dpro_search.kinds.ddp.job import Ddp
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from dpro_search.space.transformations import PlanningFacts
from dpro_search.space.transformations.modules import ModulePrecision, change_of, in_bfloat16, recomputed, uncertainty_us
from tests.recordings import trace_of
from tests.space.transformations.moves import names_reached

PRECISION = PlanOptions(compute=frozenset({"precision"}), precision_table=BUNDLED_TORCH_TABLE)


class Halves:
    """Linear layers take half their time; every cast takes 10 us, whatever its size."""

    cast_share = 0.0

    def ratio(self, op_type, float32_us=None):
        return (0.5, 0.4, 0.6) if op_type in ("aten::linear", "AddmmBackward0") else None

    def cast_us(self, elements):
        return 10.0


def lowered(linear_us: float, other_us: float = 0.0, casts: int = 0) -> LoweredOps:
    ops = (
        LoweredOp("aten::linear", False, 1, linear_us),
        LoweredOp("AddmmBackward0", True, 2, 2 * linear_us),
        LoweredOp("aten::unheard_of", False, 1, other_us),
    )
    return LoweredOps(forward_us=1000.0, backward_us=2000.0, ops=ops, casts=casts, cast_elements=100 * casts)


def module(name: str, ops: LoweredOps | None, *, member: bool = False, refusal: str = "") -> ModuleInfo:
    return ModuleInfo(name=name, type="Block", member=member, refusal=refusal, lowered=ops)


NESTED = (
    module("encoder", lowered(400.0)),
    module("encoder.0", lowered(100.0), member=True),
    module("encoder.0.attention", lowered(50.0)),
    module("encoder.1", lowered(200.0), member=True),
    module("encoder.2", lowered(1.0, casts=4), member=True),
    module("encoder.3", lowered(100.0), member=True, refusal="it runs 2 times in a step"),
    module("pool", None),
)


def of(modules) -> ModulePrecision:
    return ModulePrecision(PlanningFacts(name="a job", tensors=()), modules, Halves())


def test_products_take_their_share_casts_come_on_top_in_both_passes_and_what_is_unknown_is_uncertain():
    change = change_of(lowered(100.0, other_us=30.0, casts=3), Halves())
    assert change.forward_us == -50.0 + 30.0
    assert change.backward_us == -100.0 + 30.0
    assert change.uncertainties_us == pytest.approx({"aten::linear": 10.0, "AddmmBackward0": 20.0, "aten::unheard_of": 15.0})


def test_a_plan_cannot_name_a_module_and_a_part_of_it():
    with pytest.raises(InputError, match=r"bfloat16_modules: module 'encoder\.0\.attention' is a part of module 'encoder\.0'"):
        Plan(bfloat16_modules=("encoder.0.attention", "encoder.0"))
    plan = Plan(bfloat16_modules=("encoder.1", "encoder.10"), recomputed_modules=("encoder.1",))
    assert Plan.from_json(plan.to_json()) == plan


def test_reasons_say_which_module_and_why():
    space = of(NESTED)
    assert "has no module 'decoder'" in str(space.legal(Plan(bfloat16_modules=("decoder",))))
    assert "'encoder.3' cannot run in bfloat16 at a known duration: it runs 2" in str(
        space.legal(Plan(bfloat16_modules=("encoder.3",)))
    )
    assert "'pool' cannot run in bfloat16 at a known duration: it computes no" in str(space.legal(Plan(bfloat16_modules=("pool",))))
    assert "record the job again" in str(of(NESTED[-1:]).legal(Plan(bfloat16_modules=("pool",))))
    assert space.legal(Plan(bfloat16_modules=("encoder.0", "encoder.2"))) is None


def test_the_blocks_that_gain_most_come_first_and_those_whose_casts_take_more_never():
    choice = of(NESTED).choice
    assert choice is not None
    assert [point["bfloat16_modules"] for point in choice.grids["blocks"]] == [("encoder.1",), ("encoder.0", "encoder.1")]
    assert [point["bfloat16_modules"] for point in choice.grids["whole"]] == [("encoder",)]


def test_moves_stay_legal_and_reach_every_module_that_gains():
    assert names_reached(of(NESTED), "bfloat16_modules") == {"encoder", "encoder.0", "encoder.0.attention", "encoder.1"}


def named(graph: DdpGraph, ops: LoweredOps) -> DdpGraph:
    """The recorded blocks with other ops to lower."""
    return replace(graph, modules=tuple(msgspec.structs.replace(one, lowered=ops) for one in graph.modules))


def test_a_block_shortens_its_own_passes_in_proportion_and_all_that_comes_after_them(blocks_graph):
    shorter = named(blocks_graph, lowered(1000.0))  # half of a forward pass of 1000 us, and of a backward pass of 2000 us
    changed = in_bfloat16(shorter, ("1",), Halves())
    forward_us = blocks_graph.forward_us[:, :, 1] / 2
    backward_us = (blocks_graph.backward_until_us - blocks_graph.backward_from_us)[:, :, 1] / 2
    np.testing.assert_allclose(blocks_graph.backward_us - changed.backward_us, forward_us + backward_us)
    np.testing.assert_allclose(changed.forward_us[:, :, 1], forward_us)
    np.testing.assert_allclose(changed.forward_from_us[:, :, 1], blocks_graph.forward_from_us[:, :, 1])
    last = [
        i for i, tensor in enumerate(blocks_graph.tensors) if tensor.name.startswith("3.")
    ]  # ready before that block's backward pass
    np.testing.assert_allclose(
        (blocks_graph.ready_us - changed.ready_us)[:, :, last], np.repeat(forward_us[:, :, None], len(last), 2)
    )


def test_a_block_in_bfloat16_that_is_computed_again_takes_its_shorter_time_again(blocks_graph):
    changed = in_bfloat16(named(blocks_graph, lowered(1000.0)), ("1",), Halves())
    again_us = recomputed(changed, ("1",)).backward_us - changed.backward_us
    np.testing.assert_allclose(again_us, blocks_graph.again_us[:, :, 1] / 2)


@settings(deadline=None, max_examples=30)
@given(
    names=st.sets(st.sampled_from("012")),
    linear_us=st.floats(0, 5000),
    casts=st.integers(0, 200),
    again=st.sets(st.sampled_from("012")),
)
def test_core_times_stay_in_order_under_any_plan(blocks_graph, names, linear_us, casts, again):
    changed = recomputed(in_bfloat16(named(blocks_graph, lowered(linear_us, casts=casts)), sorted(names), Halves()), sorted(again))
    assert (changed.forward_us >= -1e-6).all()
    assert (changed.again_us >= -1e-6).all()
    assert (changed.backward_from_us <= changed.backward_until_us + 1e-6).all()
    order = np.argsort(blocks_graph.ready_us, axis=2, kind="stable")
    assert (np.diff(np.take_along_axis(changed.ready_us, order, axis=2), axis=2) >= -1e-6).all()
    assert (changed.ready_us <= changed.backward_us[:, :, None] + 1e-6).all()


def test_an_empty_plan_leaves_the_graph_as_it_is(blocks_graph):
    same = in_bfloat16(blocks_graph, (), Halves())
    for name in ("ready_us", "backward_us", "forward_post_us", "again_us", "backward_from_us"):
        np.testing.assert_allclose(getattr(same, name), getattr(blocks_graph, name))
    assert uncertainty_us(blocks_graph, (), Halves()) == 0.0


def test_a_price_says_how_uncertain_the_ratios_are_and_nothing_of_memory(blocks_trace):
    measured, plan = Ddp.measured_step(blocks_trace), Plan(bfloat16_modules=("0", "1"))
    options = PlanOptions(compute=frozenset({"precision"}))
    sure, doubtful = (
        JobInScenario(Ddp(replace(measured, graph=named(measured.graph, ops)), options, ratios=Halves()))
        for ops in (lowered(1000.0), lowered(1000.0, other_us=50_000.0))
    )
    widths = [np.diff(one.predict(plan).interval_us)[0] for one in (sure, doubtful)]
    assert widths[1] > widths[0] + 2 * 40_000
    assert sure.predict(plan).peak_memory_bytes is None
    assert sure.predict(plan).source == "extrapolated"


def test_a_search_knows_it_only_where_it_is_asked_for_and_has_a_table_of_pytorch(blocks_trace):
    assert job_of(blocks_trace, PRECISION).space.fields == (
        "bucket_cap_bytes",
        "first_bucket_bytes",
        "gradient_as_bucket_view",
        "bfloat16_modules",
    )
    both = replace(PRECISION, compute=frozenset({"precision", "recomputation"}))
    assert job_of(blocks_trace, both).space.fields == (
        "bucket_cap_bytes",
        "first_bucket_bytes",
        "gradient_as_bucket_view",
        "bfloat16_modules",
        "recomputed_modules",
    )
    with pytest.raises(InputError, match="precision: name a table of what bfloat16 does to PyTorch's ops"):
        job_of(blocks_trace, PlanOptions(compute=frozenset({"precision"})))
    with pytest.raises(InputError, match="the table is not of PyTorch's ops"):
        job_of(blocks_trace, replace(PRECISION, precision_table=BUNDLED_TABLE))
    with pytest.raises(InputError, match="no memory limit can be kept with it"):
        job_of(blocks_trace, replace(PRECISION, memory_limit_bytes=10**12))
    with pytest.raises(InputError, match="precision: name a table of what bfloat16 does to PyTorch's ops"):
        job_of(blocks_trace).job.lower(Scenario(plan=Plan(bfloat16_modules=("0",))))


def test_what_a_recording_does_not_tell_is_refused(blocks_trace):
    with pytest.raises(InputError, match="precision: the job was recorded before modules were kept"):
        job_of(trace_of("ddp_mlp"), PRECISION)
    silent = replace(blocks_trace, modules=tuple(msgspec.structs.replace(one, lowered=None) for one in blocks_trace.modules))
    with pytest.raises(InputError, match="precision: the recording does not tell which ops of its modules would run in bfloat16"):
        job_of(silent, PRECISION)


def test_the_bundled_table_halves_products():
    model = named_model(BUNDLED_TORCH_TABLE, "torch")
    for op_type in ("aten::linear", "AddmmBackward0", "aten::conv2d", "ConvolutionBackward0 pointwise"):
        assert 0.25 < model.ratio(op_type)[0] < 0.75
    assert model.ratio("TBackward0") is None
