"""A grouping is priced as if its whole graph were built and replayed, whatever shortcuts are taken."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dpro_search.errors import GraphError, InputError
from dpro_search.replay.grouping import GroupingReplay, Shortcuts
from dpro_search.replay.kernels import group_state, groups
from dpro_search.replay.replayer import replay
from dpro_search.space.data_parallel import DataParallelJob, layered_step, replicated
from dpro_search.space.job_graph import build
from dpro_search.space.network import HalvingDoubling, Network, ParameterServer, Rendezvous, Ring
from dpro_search.space.replay_graph import OrderPolicy
from tests.random_steps import random_step

POLICIES = (int(OrderPolicy.PROGRAM), int(OrderPolicy.FIFO))
SIZES = np.array([600.0, 1200.0, 300.0, 600.0, 900.0])
DURATIONS_US = (0.0, 1.0, 2.0, 7.0)
ALL = [Shortcuts(coarsen=a, symmetry=b, partial=c) for a, b, c in itertools.product((False, True), repeat=3)]


def built_us(job, group_of):
    """The price of a grouping by way of its graph; None if it cannot be replayed."""
    members = [tuple(np.flatnonzero(group_of == group).tolist()) for group in np.unique(group_of)]
    try:
        return replay(build(replace(job, groups=tuple(sorted(members, key=lambda group: group[-1]))))).iteration_us
    except GraphError:
        return None


def priced_us(pricer, group_of):
    try:
        return pricer.iteration_us(group_of)
    except GraphError:
        return None


@st.composite
def jobs(draw):
    ranks = draw(st.sampled_from([1, 2, 2, 3, 4]))
    network = Network.uniform(ranks, draw(st.sampled_from([50.0, 100.0])), latency_us=draw(st.sampled_from([0.0, 1.0])))
    schemes = [Ring(reduce_us_per_byte=0.003), Ring(), Rendezvous(latency_us=2.0, us_per_byte=0.01)]
    schemes += [HalvingDoubling(reduce_us_per_byte=0.003)] if ranks & (ranks - 1) == 0 else []
    whole = draw(st.booleans())
    seeds = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=2))
    steps = tuple(random_step(seed, SIZES, POLICIES, DURATIONS_US, barrier=whole) for seed in seeds)
    return DataParallelJob(
        steps=steps,
        step_of_rank=np.array(draw(st.lists(st.integers(0, len(steps) - 1), min_size=ranks, max_size=ranks))),
        scheme=draw(st.sampled_from(schemes)),
        network=network,
        compute_factor=np.array(draw(st.lists(st.sampled_from([1.0, 1.0, 1.5]), min_size=ranks, max_size=ranks))),
        negotiate_us=draw(st.sampled_from([None, 0.0, 3.0])),
    )


GROUPINGS = st.lists(st.lists(st.integers(0, len(SIZES) - 1), min_size=len(SIZES), max_size=len(SIZES)), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(jobs(), GROUPINGS)
def test_every_shortcut_gives_the_price_of_the_whole_graph(job, groupings):
    expected = [built_us(job, np.array(group_of)) for group_of in groupings]
    event("a deadlock" if None in expected else "no deadlock")
    for shortcuts in ALL:
        pricer = GroupingReplay(job, shortcuts)
        assert pricer.why_not is None
        for group_of, price_us in zip(groupings, expected, strict=True):
            assert priced_us(pricer, np.array(group_of)) == pytest.approx(price_us, rel=1e-9), shortcuts
        if pricer.resumed:
            event("went on from another grouping")


def uneven(tensors=40, ranks=4, scheme=None, **options):
    rng = np.random.default_rng(1)
    step = layered_step(
        rng.integers(1, 50, tensors) * 1000.0, forward_us=900.0, backward_us=rng.integers(20, 90, tensors).astype(float),
        update_us=4.0,
    )  # fmt: skip
    network = Network.uniform(ranks, 250.0, latency_us=5.0, other_hosts=1)
    return replicated(step, ranks, scheme or Ring(), network=network, **options)


def moved(group_of, rng):
    """One tensor goes to the group of another."""
    tensor, other = rng.integers(0, len(group_of), 2)
    changed = group_of.copy()
    changed[tensor] = group_of[other]
    return changed


@pytest.mark.parametrize("symmetry", [True, False])
def test_a_walk_goes_on_from_snapshots_and_finds_the_same_prices(symmetry):
    rng = np.random.default_rng(0)
    job = uneven()
    pricer, plain = (GroupingReplay(job, Shortcuts(symmetry=symmetry, partial=partial)) for partial in (True, False))
    group_of = np.arange(40) // 4
    for _ in range(150):
        proposed = moved(group_of, rng)
        assert pricer.iteration_us(proposed) == plain.iteration_us(proposed)
        if rng.random() < 0.5:
            group_of = proposed
    assert pricer.resumed > 50
    assert plain.resumed == 0
    assert pricer.iteration_us(group_of) == pytest.approx(built_us(job, group_of), rel=1e-9)


def test_snapshots_are_taken_where_they_pay_or_where_they_are_asked_for():
    for shortcuts, resumes in ((Shortcuts(), False), (Shortcuts(partial=True), True)):
        pricer = GroupingReplay(uneven(), shortcuts)
        for _ in range(2):
            pricer.iteration_us(np.arange(40) // 4)
        assert (pricer.resumed > 0) == resumes


def test_sixteen_alike_workers_are_one():
    assert GroupingReplay(uneven(ranks=16)).rows == 1
    assert GroupingReplay(uneven(ranks=16), Shortcuts(symmetry=False)).rows == 16


def test_a_straggler_in_a_ring_is_replayed_with_everybody():
    job = uneven(ranks=3, compute_factor=np.array([1.0, 1.3, 1.0]))
    group_of = np.arange(40) // 5
    assert GroupingReplay(job).rows == 3
    assert GroupingReplay(job).iteration_us(group_of) == pytest.approx(built_us(job, group_of), rel=1e-9)


def test_what_cannot_be_laid_out_is_built_each_time():
    job = uneven(ranks=2, scheme=ParameterServer(server_host=(2,), partition_bytes=30_000.0, sum_us_per_byte=1e-4))
    pricer = GroupingReplay(job)
    assert pricer.why_not == "ParameterServer cuts groups into partitions"
    for width in (1, 8):
        group_of = np.arange(40) // width
        assert pricer.iteration_us(group_of) == built_us(job, group_of)


@pytest.mark.parametrize("group_of", [[0, 1], [0] * 39 + [40], [-1] * 40])
def test_what_is_no_grouping_is_refused(group_of):
    with pytest.raises(InputError, match="a number from 0 to 39 for each of 40 tensors"):
        GroupingReplay(uneven()).iteration_us(np.array(group_of))


def test_each_helper_is_compiled_for_one_type_of_numbers():
    """A first prediction waits for the compiler, which makes a helper anew for each type; of those on disk it makes none."""
    step = layered_step(SIZES, forward_us=5.0, backward_us=np.ones(5), update_us=1.0)
    job = replicated(step, 2, Rendezvous(latency_us=2.0, us_per_byte=0.01))
    GroupingReplay(job).iteration_us(np.arange(5))
    for helper in (groups._enqueue, group_state.begin, group_state.save, group_state.restore, groups.advance):
        assert len(helper.signatures) <= 1
