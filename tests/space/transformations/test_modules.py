"""Recomputation by module: which modules, what it costs, and what it saves; on a real two-rank recording of three blocks."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from dpro_search.collect.modules import ModuleInfo
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario, PlanOptions, job_of
from dpro_search.kinds.ddp.job import Ddp
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from dpro_search.space.transformations import PlanningFacts
from dpro_search.space.transformations.modules import ModuleRecomputation, recomputed, saved_bytes
from tests.recordings import trace_of
from tests.space.transformations.moves import names_reached

RECOMPUTATION = PlanOptions(compute=frozenset({"recomputation"}))


def module(name: str, frees_bytes: int = 1, behind_bytes: int = 0, refusal: str = "", *, member: bool = False) -> ModuleInfo:
    return ModuleInfo(name=name, type="Block", member=member, frees_bytes=frees_bytes, behind_bytes=behind_bytes, refusal=refusal)


NESTED = (
    module("encoder", 10),
    module("encoder.0", 4, member=True),
    module("encoder.0.attention", 2),
    module("encoder.1", 4, member=True),
    module("encoder.2", 0, member=True),
    module("encoder.3", 4, refusal="it communicates in its forward pass", member=True),
)


def of(modules) -> ModuleRecomputation:
    return ModuleRecomputation(PlanningFacts(name="a job", tensors=()), modules)


def test_a_plan_cannot_name_a_module_and_a_part_of_it():
    with pytest.raises(InputError, match=r"recomputed_modules: module 'encoder\.0\.attention' is a part of module 'encoder\.0'"):
        Plan(recomputed_modules=("encoder.0.attention", "encoder.0"))
    with pytest.raises(InputError, match="module 'encoder' is named twice"):
        Plan(recomputed_modules=("encoder", "encoder"))
    plan = Plan(recomputed_modules=("encoder.1", "encoder.10"))
    assert Plan.from_json(plan.to_json()) == plan


def test_reasons_say_which_module_and_why():
    space = of(NESTED)
    assert "has no module 'decoder'" in str(space.legal(Plan(recomputed_modules=("decoder",))))
    assert "'encoder.3' cannot be computed again: it communicates" in str(space.legal(Plan(recomputed_modules=("encoder.3",))))
    assert "before modules were kept" in str(of(()).legal(Plan(recomputed_modules=("encoder",))))
    assert space.legal(Plan(recomputed_modules=("encoder.0", "encoder.1"))) is None


def test_the_first_blocks_come_first_and_those_that_free_nothing_never():
    choice = of(NESTED).choice
    assert choice is not None
    assert [point["recomputed_modules"] for point in choice.grids["first"]] == [("encoder.0",), ("encoder.0", "encoder.1")]


def test_moves_stay_legal_and_reach_every_candidate():
    assert names_reached(of(NESTED), "recomputed_modules") == {"encoder", "encoder.0", "encoder.0.attention", "encoder.1"}


def test_a_block_runs_again_before_its_gradients_and_after_those_of_the_blocks_behind_it(blocks_graph):
    changed = recomputed(blocks_graph, ("1",))
    later = {tensor.name: (changed.ready_us - blocks_graph.ready_us)[:, :, i] for i, tensor in enumerate(blocks_graph.tensors)}
    again_us = blocks_graph.again_us[:, :, 1]
    for name, us in later.items():
        np.testing.assert_allclose(us, again_us if name.startswith(("0.", "1.")) else 0.0)
    np.testing.assert_allclose(changed.backward_us - blocks_graph.backward_us, again_us)


def test_what_runs_again_takes_its_time(blocks_trace):
    measured = Ddp.measured_step(blocks_trace)
    graph = replace(measured.graph, again_us=measured.graph.again_us + 50_000.0)
    slow = JobInScenario(Ddp(replace(measured, graph=graph), RECOMPUTATION))
    took_us = [slow.predict(Plan(recomputed_modules=names)).iteration_us for names in (None, ("0",), ("0", "1"))]
    assert took_us[0] + 50_000 < took_us[1] < took_us[2] - 50_000


def test_the_peak_falls_by_what_is_freed_as_long_as_it_stays_at_the_end_of_the_forward_pass(blocks_graph):
    wide = replace(
        blocks_graph, modules=(module("0", 100, 250), module("1", 100, 100), module("2", 50, 0)), tensors=blocks_graph.tensors[:0]
    )
    wide = replace(wide, ready_us=blocks_graph.ready_us[:, :, :0])
    assert saved_bytes(wide, ()) == 0
    assert saved_bytes(wide, ("0",)) == 100
    assert saved_bytes(wide, ("2",)) == 0  # it is whole again while all that lies before it is still there
    assert saved_bytes(wide, ("0", "1")) == 200
    assert saved_bytes(wide, ("0", "1", "2")) == 200
    unknown = tuple(msgspec.structs.replace(one, frees_bytes=-1) for one in wide.modules)
    assert saved_bytes(replace(wide, modules=unknown), ("0",)) is None


def test_where_the_gradients_are_more_than_what_is_kept_nothing_is_saved(blocks_graph):
    # 64 kB are kept for the backward pass, at the end of which 104 kB of gradients are there.
    assert saved_bytes(blocks_graph, ("0", "1", "2")) == 0


def test_a_search_knows_it_only_where_it_is_asked_for(blocks_trace):
    assert job_of(blocks_trace).space.fields == ("bucket_cap_bytes", "first_bucket_bytes", "gradient_as_bucket_view")
    assert job_of(blocks_trace, RECOMPUTATION).space.fields == (
        "bucket_cap_bytes",
        "first_bucket_bytes",
        "gradient_as_bucket_view",
        "recomputed_modules",
    )
    limited = job_of(blocks_trace, PlanOptions(memory_limit_bytes=10**12))
    assert "recomputed_modules" in limited.space.fields


def test_what_a_recording_or_ddp_does_not_have_is_refused(blocks_trace):
    old = trace_of("ddp_mlp")
    with pytest.raises(InputError, match="recomputation: the job was recorded before modules were kept"):
        job_of(old, RECOMPUTATION)
    with pytest.raises(InputError, match="recomputed_modules: the job was recorded before modules were kept"):
        job_of(old).job.lower(Scenario(plan=Plan(recomputed_modules=("0",))))
    with pytest.raises(InputError, match="op-fusion: a DistributedDataParallel job has plans for buckets, precision and recomput"):
        job_of(blocks_trace, PlanOptions(compute=frozenset({"op-fusion"})))
