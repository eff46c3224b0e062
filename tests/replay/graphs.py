"""Random replay graphs for property tests."""

import numpy as np
from hypothesis import strategies as st

from dpro_search.graph.dataflow import OpKind
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph, SharedCores, csr

POLICIES = tuple(OrderPolicy)
TIMES = ("ready_us", "start_us", "moved_us", "end_us")
# Few values, so that ops often become ready, end and tie at one instant; 0 ends at once.
DURATIONS = st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.0, 0.1, 0.7])


@st.composite
def replay_graphs(
    draw, *, policies=POLICIES, durations=DURATIONS, collectives=True, fluid=True, carry=False, cores=False, max_ops=24
):
    """A valid graph; one with collectives may be a deadlock."""
    count = draw(st.integers(1, max_ops))
    devices = draw(st.integers(1, 6))
    ranks = draw(st.integers(1, 3))
    position = draw(st.permutations(range(count)))  # edges go up in position, not in op number
    pairs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=2 * count))
    edges = [(u, v) for u, v in pairs if position[u] < position[v]]
    device = np.array(draw(st.lists(st.integers(0, devices - 1), min_size=count, max_size=count)), np.int32)
    fields = {}
    source, destination = (np.array([edge[i] for edge in edges], np.int32) for i in (0, 1))
    fields["pred_ptr"], fields["pred_idx"] = csr(destination, source, count)
    fields["policy"] = np.array(draw(st.lists(st.sampled_from(policies), min_size=devices, max_size=devices)), np.int8)
    if draw(st.booleans()):
        fields["priority"] = np.array(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), np.int32)
    collective = np.full(count, -1, np.int32)
    if collectives and draw(st.booleans()):
        for number in range(draw(st.integers(1, 4))):
            for op in draw(st.lists(st.integers(0, count - 1), max_size=4)):
                taken = (collective == number) & (device == device[op])
                if not taken.any() or fields["policy"][device[op]] == OrderPolicy.UNBOUNDED:
                    collective[op] = number
        fields["collective"] = collective
    if fluid and draw(st.booleans()):
        links = draw(st.integers(1, 3))
        fields["link_bytes_per_us"] = np.array(draw(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=links, max_size=links)))
        used = [draw(st.lists(st.integers(0, links - 1), min_size=1, max_size=2, unique=True)) for _ in range(count)]
        sizes = np.array(draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0]), min_size=count, max_size=count)))
        fields["flow_bytes"] = np.where(collective >= 0, 0.0, sizes)
        fields["link_ptr"] = np.cumsum([0, *map(len, used)]).astype(np.int32)
        fields["link_idx"] = np.array([link for links in used for link in links], np.int32)
    if fluid and draw(st.booleans()):
        kinds = len(OpKind)
        fields["kind"] = np.array(draw(st.lists(st.integers(0, kinds - 1), min_size=count, max_size=count)), np.int8)
        slowdown = np.ones((kinds, kinds))
        slowdown[draw(st.integers(0, kinds - 1)), draw(st.integers(0, kinds - 1))] = 1.5
        slowdown[OpKind.FORWARD, OpKind.COMM] = 2.0
        fields["slowdown"] = slowdown
    if cores:
        fields["servers"] = np.array(draw(st.lists(st.integers(1, 3), min_size=devices, max_size=devices)), np.int32)
        fields["cores"] = draw(shared_cores(device, devices, collective, fields))
    if carry:
        carried = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=count))
        fields["carry_src"], fields["carry_dst"] = (np.array([c[i] for c in carried], np.int32) for i in (0, 1))
    duration_us = np.array(draw(st.lists(durations, min_size=count, max_size=count)))
    if cores:
        duration_us = np.where(fields["cores"].idle_us > 0, np.maximum(duration_us, 1.0), duration_us)
    return ReplayGraph(
        duration_us=duration_us,
        device=device,
        rank_of_device=np.arange(devices, dtype=np.int32) % ranks,
        **fields,
    )


@st.composite
def shared_cores(draw, device, devices, collective, fields):
    """Some devices compute on one of two cores, and send nothing; ops of the others are messages or none."""
    core = np.array(draw(st.lists(st.integers(-1, 1), min_size=devices, max_size=devices)), np.int32)
    core[device[collective >= 0]] = -1
    if "flow_bytes" in fields:
        core[device[fields["flow_bytes"] > 0]] = -1
    may = (core[device] < 0) & (collective < 0)
    count, links = len(device), len(fields.get("link_bytes_per_us", ()))
    columns = {
        name: np.where(may, draw(st.lists(st.sampled_from(values), min_size=count, max_size=count)), 0.0)
        for name, values in (("idle_us", (0.0, 0.5, 1.0, 2.0)), ("core_us", (0.0, 0.2, 3.0)), ("finish_us", (0.0, 0.0, 1.0)))
    }
    return SharedCores(
        core=core,
        idle_us=columns["idle_us"],
        core_us=np.where(columns["idle_us"] > 0, columns["core_us"], 0.0),
        finish_us=np.where(columns["idle_us"] > 0, columns["finish_us"], 0.0),
        idle_bytes_per_us=np.array(draw(st.lists(st.sampled_from([1.0, 4.0]), min_size=links, max_size=links))),
        core_us_per_byte=np.array(draw(st.lists(st.sampled_from([0.0, 0.1, 0.5]), min_size=links, max_size=links))),
        latency_factors=np.array(draw(st.lists(st.sampled_from([0.3, 1.0, 1.7]), max_size=3))),
    )


def assert_equal_times(found, expected):
    """All times are equal; the order is a right one, but ops that start at one instant have many."""
    for name in TIMES:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    assert sorted(found.order) == list(range(len(found.order)))
    assert (np.diff(found.start_us[found.order]) >= 0).all()
