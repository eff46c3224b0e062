"""Spaces of plans: what each kind of job knows, refuses and moves to."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from bus_objective import tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.trace import CommSettings
from dpro_search.costmodel.collectives.all_reduce_choice import AllReduceChoice
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan, refuse_unknown
from dpro_search.space.transformations import (
    RECORDED,
    BucketSize,
    BytepsCompression,
    Credit,
    DdpCompression,
    KeySlicing,
    KvstoreCompression,
    PlanningFacts,
    PlanSpace,
    ServerCount,
    ServerPlacement,
    TensorPartition,
    horovod_facts,
    horovod_space,
)
from dpro_search.space.transformations.horovod import AllReduceAlgorithms
from tests.every_case import every_case

TENSORS = tensors_of([4_000_000, 40_000, 400_000, 8_000, 1_200_000])


def horovod() -> PlanSpace:
    return horovod_space(TENSORS, CommSettings(fusion_threshold_bytes=2**20, cycle_time_us=1000.0))


def mpi(ranks_per_host: int = 1) -> PlanSpace:
    """Horovod on Open MPI, where small all-reduces are faster by doubling, large ones by the ring."""
    recorded = CommSettings(fusion_threshold_bytes=2**20, cycle_time_us=1000.0)
    ratio = {"recursive-doubling": np.array([0.8, 1.0, 1.5]), "ring": np.array([1.6, 1.1, 0.9])}
    if ranks_per_host > 1:
        ratio["hierarchy"] = np.array([2.0, 1.2, 0.6])
    known = AllReduceChoice(from_bytes=np.array([0.0, 2.0**16, 1.5e6]), ratio=ratio, ranks_per_host=ranks_per_host)
    return horovod_space(TENSORS, recorded, others=(AllReduceAlgorithms(horovod_facts(TENSORS, recorded), known),))


def ddp() -> PlanSpace:
    job = PlanningFacts(name="a DistributedDataParallel job", tensors=TENSORS)
    return PlanSpace(job, (BucketSize(job), DdpCompression(job, 1.0)))


def ddp_of_matrices() -> PlanSpace:
    matrices = tuple(msgspec.structs.replace(tensor, shape=(tensor.size_bytes // 400, 100)) for tensor in TENSORS)
    job = PlanningFacts(name="a DistributedDataParallel job", tensors=matrices)
    return PlanSpace(job, (BucketSize(job), DdpCompression(job, 1.0)))


def kvstore(*, p3: bool = False, limited: bool = True) -> PlanSpace:
    values = {"servers": 2, "servers_on_workers": False, "bigarray_bound": 1_000_000, "p3": p3, "slice_threshold": 40_000}
    job = PlanningFacts(name="a job with parameter servers", tensors=TENSORS, values=values)
    slicing = KeySlicing(job, tuple(tensor.size_bytes // 4 for tensor in TENSORS))
    placement, compression = ServerPlacement(job, limited=limited), KvstoreCompression(job, ["float32"])
    return PlanSpace(job, (ServerCount(job), slicing, placement, compression))


def byteps() -> PlanSpace:
    values = {"servers": 2, "servers_on_workers": True, "partition_bytes": 4_096_000, "credit": 0}
    job = PlanningFacts(name="a job with BytePS", tensors=TENSORS, values=values)
    placement, compression = ServerPlacement(job, limited=True), BytepsCompression(job, ["float32"])
    return PlanSpace(job, (TensorPartition(job), Credit(job), ServerCount(job), placement, compression))


SPACES = {
    "horovod": horovod,
    "mpi": mpi,
    "ddp": ddp,
    "ddp of matrices": ddp_of_matrices,
    "kvstore": kvstore,
    "kvstore without limits": lambda: kvstore(limited=False),
    "p3": lambda: kvstore(p3=True),
    "byteps": byteps,
}


@pytest.mark.parametrize("kind", SPACES)
@given(seed=st.integers(0, 10_000), moves=st.integers(1, 20))
@settings(max_examples=20, deadline=None)
def test_moves_lead_to_legal_plans_with_one_simplest_spelling(kind: str, seed: int, moves: int) -> None:
    space, rng = SPACES[kind](), np.random.default_rng(seed)
    plan = Plan()
    for _ in range(moves):
        plan = space.propose(plan, rng)
        assert space.refusal(plan) is None
    assert moves > 1 or plan != Plan()
    simplest = space.simplest(plan)
    assert space.refusal(simplest) is None
    assert space.simplest(simplest) == simplest


@every_case("kind", SPACES)
def test_every_grid_point_of_every_choice_is_a_legal_plan_that_it_recognises(kind: str) -> None:
    space = SPACES[kind]()
    for choice in space.choices:
        assert choice.put(Plan(), RECORDED, 0) == Plan()
        for grid, points in choice.grids.items():
            for number in range(len(points)):
                plan = choice.put(Plan(), grid, number)
                assert space.refusal(plan) is None
                assert choice.nearest(plan) == (grid, number)


@every_case("kind", SPACES)
def test_starting_points_are_legal_and_begin_with_the_recorded_setting(kind: str) -> None:
    space = SPACES[kind]()
    starts = space.starts(5)
    assert len(starts) == 5
    assert starts[0] == space.detailed(Plan())
    assert all(space.refusal(plan) is None for plan in starts)
    assert len(set(starts)) > 1


@every_case(
    ("kind", "plan", "why"),
    [
        ("horovod", Plan(servers=2), "a Horovod job has no servers; it knows fusion_threshold_bytes, tensor_groups, cycle_time_us"),
        ("horovod", Plan(tensor_groups=(("g0", "nothing"),)), "the trace has no tensor 'nothing' (its first is 'g0')"),
        ("ddp", Plan.of(fusion_threshold_bytes=1), "a DistributedDataParallel job has no fusion_threshold_bytes"),
        ("kvstore", Plan.of(p3=True, slice_threshold=10), "at most 20000 are replayed"),
        ("kvstore", Plan.of(credit=1), "a job with parameter servers has no credit"),
        ("ddp", Plan(compression="2bit"), "a DistributedDataParallel job has fp16"),
        ("ddp", Plan(compression="powersgd-1"), "compress no gradient of this job"),
        ("kvstore", Plan(compression="powersgd-1"), "a job with parameter servers has 2bit"),
        ("horovod", Plan(compression="powersgd-1"), "a Horovod job has no compression"),
        ("kvstore", Plan(compression="fp16"), "a job with parameter servers has 2bit"),
        ("kvstore", Plan.of(compression="2bit", p3=True), "does not compress priority slices"),
        ("p3", Plan(compression="2bit"), "does not compress priority slices"),
        ("byteps", Plan(servers=5000), "at most 1024 are replayed"),
        ("byteps", Plan(compression="2bit"), "a job with BytePS has fp16"),
        ("byteps", Plan(micro_batches=2), "a job with BytePS has no micro_batches; it knows partition_bytes, credit, servers"),
    ],
)
def test_what_a_job_cannot_follow_is_refused_with_the_reason(kind: str, plan: Plan, why: str) -> None:
    space = SPACES[kind]()
    assert why in str(space.refusal(plan))
    with pytest.raises(InputError, match="plan: "):
        space.check(plan)


def test_powersgd_is_to_choose_where_gradients_are_matrices() -> None:
    kinds = {
        name: next(choice for choice in SPACES[name]().choices if choice.name == "compression").grids["set"]
        for name in SPACES
        if "ddp" in name
    }
    assert [point["compression"] for point in kinds["ddp"]] == ["fp16"]
    assert [point["compression"] for point in kinds["ddp of matrices"]] == ["fp16", "powersgd-4", "powersgd-2", "powersgd-1"]


def test_a_field_without_effect_is_left_out() -> None:
    assert kvstore().simplest(Plan.of(slice_threshold=100_000)) == Plan(), "there are no slices"
    assert kvstore().simplest(Plan.of(p3=True, bigarray_bound=5)) == Plan.of(p3=True), "priority slices know no bound"
    assert kvstore(p3=True).simplest(Plan.of(p3=True, servers=2)) == Plan()
    grouped = (("g0", "g1"), ("g2", "g3", "g4"))
    assert horovod().simplest(Plan.of(tensor_groups=grouped, fusion_threshold_bytes=5)) == Plan(tensor_groups=grouped)


def test_there_is_another_placement_to_choose_where_links_have_a_limit() -> None:
    assert [choice.grids["set"] for choice in byteps().choices if choice.name == "placement"] == [({"servers_on_workers": False},)]
    assert "placement" not in [choice.name for choice in kvstore(limited=False).choices]
    placed = Plan(servers=3, servers_on_workers=True)
    assert kvstore().simplest(placed) == placed
    assert byteps().simplest(placed) == Plan(servers=3), "as recorded"
    assert kvstore(limited=False).simplest(placed) == Plan(servers=3), "it has no effect"


def test_moves_go_where_there_is_something_to_gain() -> None:
    space, rng = horovod(), np.random.default_rng(0)
    start = space.detailed(Plan.of(fusion_threshold_bytes=0))
    touched = [0, 0]
    for _ in range(400):
        moved = space.propose(start, rng, {"g4": 100.0})
        if moved.tensor_groups != start.tensor_groups and moved.tensor_groups is not None:
            changed = {name for group in set(moved.tensor_groups) ^ set(start.tensor_groups or ()) for name in group}
            touched["g4" in changed] += 1
    assert touched[1] > 2 * touched[0]


def test_the_shared_refusal_names_the_field_and_what_there_is() -> None:
    with pytest.raises(InputError, match="plan: a thing has no credit; it knows servers"):
        refuse_unknown(Plan.of(credit=1), ("servers",), "a thing")
    refuse_unknown(Plan(servers=1), ("servers",), "a thing")


def test_the_fastest_algorithm_by_size_is_among_the_choices():
    choice = next(choice for choice in mpi().choices if choice.name == "all-reduce")
    assert choice.put(Plan(), "fastest", 0) == Plan.of(allreduce_algorithms=((0, "recursive-doubling"), (1_500_000, "ring")))


def test_an_algorithm_of_which_nothing_is_known_is_refused():
    with pytest.raises(InputError, match="nothing is known of rabenseifner, only of recursive-doubling, ring"):
        mpi().check(Plan.of(allreduce_algorithms=((0, "rabenseifner"),)))
    with pytest.raises(InputError, match="a Horovod job has no allreduce_algorithms"):
        horovod().check(Plan.of(allreduce_algorithms=((0, "ring"),)))


def test_a_hierarchy_is_a_choice_where_hosts_have_several_ranks_and_refused_with_the_reason_elsewhere():
    planned = Plan.of(allreduce_algorithms=((0, "ring"), (2**20, "hierarchy")))
    mpi(ranks_per_host=2).check(planned)
    choice = next(choice for choice in mpi(ranks_per_host=2).choices if choice.name == "all-reduce")
    assert planned in [
        choice.put(Plan(), "ring, then hierarchy", index) for index in range(len(choice.grids["ring, then hierarchy"]))
    ]
    with pytest.raises(InputError, match="every host has one rank"):
        mpi().check(planned)
