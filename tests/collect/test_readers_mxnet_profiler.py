"""MXNet's profiles: operators matched to the graph, keys recovered, worker, wire and server told apart."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from importer_kit import FUZZ, ImporterConformance, read_or_one_line, shared_traces
from mxnet_profiles import ROUNDS, STEP_US, Process, layered, server, symbol_file, worker

from dpro_search.collect.readers.mxnet import importer as mxnet_profiler
from dpro_search.collect.readers.mxnet.files import Span, Symbol, read_profile, read_symbol
from dpro_search.collect.readers.mxnet.node_matching import match_backward, match_forward, match_gradients, unmatched_warnings
from dpro_search.collect.trace import DependencyKind, EventKind, Trace
from dpro_search.errors import TraceFormatError


def branched(path: Path) -> Path:
    """A shortcut around two convolutions, then two parallel convolutions: the blocks of ResNet and Inception."""
    return symbol_file(
        path,
        [
            ("null", "data", []),
            ("Convolution", "stem", ["data"]),
            ("Convolution", "body1", ["stem"]),
            ("Convolution", "body2", ["body1"]),
            ("Convolution", "shortcut", ["stem"]),
            ("elemwise_add", "sum", ["body2", "shortcut"]),
            ("Convolution", "left", ["sum"]),
            ("Convolution", "right", ["sum"]),
            ("Concat", "join", ["left", "right"]),
        ],
    )


def symbol(path: Path) -> Symbol:
    symbol_graph = read_symbol(path)
    assert symbol_graph is not None
    return symbol_graph


def spans(*ops: tuple[str, float, float]) -> list[Span]:
    return [Span(start, end, name, 0) for name, start, end in ops]


def matched(graph: Symbol, nodes: list[int]) -> list[str]:
    return [graph.names[node] if node >= 0 else "" for node in nodes]


def job(folder: Path, **second: bool) -> list[Path]:
    return [
        server(folder / "server.json"),
        layered(folder / "symbol.json"),
        worker(folder / "worker0.json"),
        worker(folder / "worker1.json", late_us=50, **second),
    ]


def rows(trace: Trace, rank: int, kind: EventKind, step: int = 0) -> list[tuple[str, str, float, float]]:
    """(event, tensor, start, end) of a rank's events of a kind in a step; times since the step's start."""
    events = trace.events
    chosen = np.flatnonzero((events.rank == rank) & (events.kind == kind) & (events.step == step))
    begin = trace.steps.start_us[(trace.steps.rank == 0) & (trace.steps.index == step)][0]
    return [
        (
            trace.names[events.name[i]],
            trace.tensors[events.tensor[i]].name if events.tensor[i] >= 0 else "",
            float(events.start_us[i] - begin),
            float(events.end_us[i] - begin),
        )
        for i in chosen
    ]


class TestMXNet(ImporterConformance):
    importer = mxnet_profiler.IMPORTER

    @pytest.fixture
    def files(self, tmp_path):
        return job(tmp_path)


class TestMatching:
    def test_a_chain_is_matched_in_order(self, tmp_path):
        graph = symbol(layered(tmp_path / "s.json"))
        matches = match_forward(graph, spans(("FullyConnected", 0, 1), ("FullyConnected", 1, 2), ("softmax", 2, 3)))
        assert matched(graph, matches) == ["a_fwd", "b_fwd", ""]

    def test_of_operators_whose_inputs_are_there_the_first_in_the_graph_runs(self, tmp_path):
        graph = symbol(branched(tmp_path / "s.json"))
        matches = match_forward(graph, spans(*(("Convolution", t, t + 1) for t in (0, 1, 2, 3)), ("elemwise_add", 4, 5)))
        assert matched(graph, matches) == ["stem", "body1", "body2", "shortcut", "sum"]

    def test_a_shortcut_is_told_from_the_body_by_what_has_ended(self, tmp_path):
        graph = symbol(branched(tmp_path / "s.json"))
        # Two threads: body1 runs until 9, so what starts at 2 can only be the shortcut, and at 9 body2.
        matches = match_forward(
            graph, spans(("Convolution", 0, 1), ("Convolution", 1, 9), ("Convolution", 2, 3), ("Convolution", 9, 10))
        )
        assert matched(graph, matches) == ["stem", "body1", "shortcut", "body2"]

    def test_parallel_branches_go_in_the_order_of_the_graph(self, tmp_path):
        graph = symbol(branched(tmp_path / "s.json"))
        ops = [("Convolution", t, t + 1) for t in range(4)] + [
            ("elemwise_add", 4, 5),
            ("Convolution", 5, 8),
            ("Convolution", 5.5, 6),
        ]
        assert matched(graph, match_forward(graph, spans(*ops)))[5:] == ["left", "right"]

    def test_backward_goes_the_other_way_also_where_a_sum_leaves_no_event(self, tmp_path):
        graph = symbol(branched(tmp_path / "s.json"))
        ops = spans(("_backward_Concat", 0, 1), *(("_backward_Convolution", t, t + 1) for t in range(1, 7)))
        matches = matched(graph, match_backward(graph, ops))
        assert matches == ["join", "right", "left", "shortcut", "body2", "body1", "stem"]

    def test_more_operators_than_the_graph_has_stay_unmatched(self, tmp_path):
        graph = symbol(layered(tmp_path / "s.json"))
        assert match_forward(graph, spans(*(("FullyConnected", t, t + 1) for t in range(3))))[-1] == -1

    def test_gradients_are_sent_when_their_nodes_backward_has_ended(self, tmp_path):
        graph = symbol(layered(tmp_path / "s.json"))
        backward = [(Span(0, 5, "", 0), graph.names.index("b_fwd")), (Span(5, 9, "", 0), graph.names.index("a_fwd"))]
        comm = spans(*((f"push {t}", t, 20) for t in (6, 7, 10, 11)))
        assert matched(graph, match_gradients(graph, backward, comm)) == ["b_bias", "b_weight", "a_bias", "a_weight"]

    def test_gradients_sent_before_they_were_ready_are_not_matched(self, tmp_path):
        graph = symbol(layered(tmp_path / "s.json"))
        backward = [(Span(0, 5, "", 0), graph.names.index("b_fwd")), (Span(5, 9, "", 0), graph.names.index("a_fwd"))]
        assert match_gradients(graph, backward, spans(*((f"push {t}", t, 20) for t in (6, 7, 8, 11)))) == [-1] * 4


def test_operators_get_the_names_of_the_graphs_nodes(tmp_path):
    trace = mxnet_profiler.read(job(tmp_path))
    names = [name for name, *_ in rows(trace, 0, EventKind.KERNEL)]
    assert names == ["a_fwd", "b_fwd", "log_softmax", "b_fwd backward", "a_fwd backward"]
    assert trace.meta.dropped["operators matched to no node of the graph: log_softmax"] == 4


@pytest.mark.parametrize(("unmatched_us", "warnings"), [(9.0, 0), (11.0, 1)])
def test_unmatched_operators_are_warned_about_from_one_percent_of_the_time(unmatched_us, warnings):
    assert len(unmatched_warnings(unmatched_us, 1000.0)) == warnings


def test_keys_are_recovered_and_matched_across_workers(tmp_path):
    trace = mxnet_profiler.read(job(tmp_path))
    assert [tensor for _, tensor, *_ in rows(trace, 0, EventKind.COMM)] == ["b_bias", "b_weight", "a_bias", "a_weight"]
    comm = trace.events.select(trace.events.kind == EventKind.COMM)
    assert np.bincount(comm.collective).tolist() == [2] * 8
    for number in range(8):
        assert len(set(comm.tensor[comm.collective == number])) == 1


def test_workers_whose_gradients_of_one_node_start_in_another_order_agree_by_their_ends(tmp_path):
    trace = mxnet_profiler.read(job(tmp_path, swapped=True))
    ends = [{tensor: end for _, tensor, _, end in rows(trace, rank, EventKind.COMM)} for rank in (0, 1)]
    assert ends[0] == ends[1]


def test_the_servers_work_belongs_to_the_key_in_whose_time_it_fell(tmp_path):
    trace = mxnet_profiler.read(job(tmp_path))
    work = rows(trace, 2, EventKind.SERVER, step=1)
    sums = {tensor: start for name, tensor, start, _ in work if name == "BinaryOpKernel"}
    assert sums == ROUNDS
    assert {tensor: start for name, tensor, start, _ in work if name == "CopyCPU2CPU"} == {k: t - 500 for k, t in ROUNDS.items()}
    assert not any("matched to no key" in warning for warning in trace.meta.warnings)


def test_the_way_to_the_server_and_back_is_told_from_its_work(tmp_path):
    trace = mxnet_profiler.read(job(tmp_path))
    ways = {name: (start, end) for name, _, start, end in rows(trace, 0, EventKind.COLLECTIVE)}
    assert ways["a_weight push"] == (3511, 7000)  # worker 0 is first: its part is copied
    assert ways["a_weight pull"] == (7610, 7650)
    assert {name: start for name, _, start, _ in rows(trace, 1, EventKind.COLLECTIVE)}["a_weight push"] == 3561


def test_dependencies_follow_the_graph_the_gradients_and_the_server(tmp_path):
    trace = mxnet_profiler.read(job(tmp_path))
    events, needs = trace.events, trace.dependencies
    kinds = needs.kind == DependencyKind.DATA
    assert (events.start_us[needs.target] >= events.end_us[needs.source])[kinds].all()
    assert (events.start_us[needs.target] >= events.start_us[needs.source]).all()
    names = [trace.names[i] for i in events.name]
    pairs = {(names[s], names[t]) for s, t in zip(needs.source, needs.target, strict=True)}
    assert {
        ("a_fwd", "b_fwd"), ("b_fwd backward", "a_fwd backward"), ("a_fwd backward", "KVStoreDistDefaultStoragePushPull"),
        ("MXKVStorePushPull", "KVStoreDistDefaultStoragePushPull"), ("a_weight push", "CopyCPU2CPU"),
        ("CopyCPU2CPU", "BinaryOpKernel"), ("BinaryOpKernel", "multi_sgd_update"), ("multi_sgd_update", "a_weight pull"),
    } <= pairs  # fmt: skip


def test_an_operator_needs_the_call_before_it_and_a_waiting_call_the_operator_that_ended_last(tmp_path):
    process = Process()
    process.span("iter0", "train", 0, 1000)
    process.span("MXInvokeCachedOp", "MXNET_C_API", 10, 20)
    process.op("FullyConnected", 30, 100)
    process.span("MXAutogradBackwardEx", "MXNET_C_API", 25, 40)
    process.op("_backward_FullyConnected", 110, 300)
    process.op("mean", 310, 320)
    process.span("MXNDArrayWaitAll", "MXNET_C_API", 50, 305)
    trace = mxnet_profiler.read([process.written(tmp_path / "a.json")])
    names = [trace.names[i] for i in trace.events.name]
    needs = trace.dependencies
    pairs = {(names[s], names[t], DependencyKind(k)) for s, t, k in zip(needs.source, needs.target, needs.kind, strict=True)}
    assert pairs == {
        ("MXInvokeCachedOp", "FullyConnected", DependencyKind.LAUNCH),
        ("MXInvokeCachedOp", "mean", DependencyKind.LAUNCH),
        ("MXAutogradBackwardEx", "_backward_FullyConnected", DependencyKind.LAUNCH),
        ("_backward_FullyConnected", "MXNDArrayWaitAll", DependencyKind.SYNC),
    }


def test_steps_are_the_marked_iterations_or_the_return_of_the_first_operator(tmp_path):
    marked = mxnet_profiler.read([worker(tmp_path / "a.json")])
    assert marked.steps.end_us - marked.steps.start_us == pytest.approx([STEP_US - 100] * 2)
    unmarked = mxnet_profiler.read([worker(tmp_path / "b.json", marked=False, steps=3)])
    assert np.diff(unmarked.steps.start_us) == pytest.approx([STEP_US] * 2)


def test_without_a_graph_gradients_are_known_by_their_order(tmp_path):
    trace = mxnet_profiler.read([worker(tmp_path / "a.json")])
    assert [tensor.name for tensor in trace.tensors] == [f"gradient {k} in start order" for k in range(4)]
    assert trace.graphs == ()


@FUZZ
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.5, 1))
def test_a_symbol_graph_may_be_damaged(tmp_path_factory, seed, share):
    folder = tmp_path_factory.mktemp("job")
    files = job(folder)
    data = np.frombuffer((folder / "symbol.json").read_bytes(), np.uint8).copy()
    rng = np.random.default_rng(seed)
    data[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
    (folder / "symbol.json").write_bytes(data.tobytes()[: int(len(data) * share)])
    read_or_one_line(mxnet_profiler.IMPORTER, files)


def test_where_workers_update_the_server_only_adds(tmp_path):
    process = Process()
    for name, start in ROUNDS.items():
        process.op("CopyCPU2CPU", start - 500, start - 490, tid=9)
        process.op("BinaryOpKernel", start, start + (80 if name.endswith("weight") else 5), tid=9)
    files = [process.written(tmp_path / "server.json"), layered(tmp_path / "symbol.json")]
    files += [worker(tmp_path / f"worker{k}.json", late_us=50 * k, steps=1) for k in (0, 1)]
    trace = mxnet_profiler.read(files)
    assert {tensor: start for name, tensor, start, _ in rows(trace, 2, EventKind.SERVER) if name == "BinaryOpKernel"} == ROUNDS
    ways = {name: (start, end) for name, _, start, end in rows(trace, 1, EventKind.COLLECTIVE)}
    assert ways["a_weight push"] == (3561, 7500)  # worker 1 is second: its part is added


def test_a_profile_without_operators(tmp_path):
    with pytest.raises(TraceFormatError, match=r"a.json: no operator of MXNet in it"):
        mxnet_profiler.read([Process().written(tmp_path / "a.json")])


def test_everything_of_a_real_parameter_server_job_is_matched():
    folder = shared_traces() / "mxnet_kvstore"
    trace = mxnet_profiler.read(
        [folder / name for name in ("server0.json.gz", "symbol.json", "worker0.json.gz", "worker1.json.gz")]
    )
    events, graph = trace.events, trace.graphs[0]
    assert (trace.meta.ranks, trace.meta.comm, len(trace.steps), len(trace.tensors)) == (3, "kvstore", 2 * 6, 10)
    ops = sum(op != "null" for op in graph.op)
    names = np.array([trace.names[i] for i in events.name])
    known = np.isin(
        names, [name + more for name, op in zip(graph.name, graph.op, strict=True) if op != "null" for more in ("", " backward")]
    )
    assert known.sum() == 2 * 6 * 2 * ops  # each node forward and backward, in each step of each worker
    assert np.bincount(events.collective[events.kind == EventKind.COMM]).tolist() == [2] * 60
    served = events.select(events.kind == EventKind.SERVER)
    assert len(served) == 3 * 60
    assert (served.step >= 0).all()
    data = trace.dependencies.kind == DependencyKind.DATA
    assert (events.start_us[trace.dependencies.target] >= events.end_us[trace.dependencies.source])[data].all()
    # The largest tensor takes the server longest.
    update = served.select(np.array([trace.names[i] == "multi_sgd_update" for i in served.name]))
    longest = [update.tensor[update.step == s][np.argmax((update.end_us - update.start_us)[update.step == s])] for s in range(6)]
    assert [trace.tensors[t].name for t in longest] == ["net_dense0_weight"] * 6


BRANCHED = Path(__file__).resolve().parents[1] / "data" / "mxnet_branched"


def branched_model(model: str, engine: str) -> tuple[Symbol, dict[bool, list[tuple[Span, int]]]]:
    """The operators of a recorded iteration with the nodes that they were matched to, forward (False) and backward (True)."""
    graph = symbol(BRANCHED / f"{model}_symbol.json.gz")
    ops = read_profile(BRANCHED / f"{model}_{engine}.json.gz", Counter()).ops
    groups = {back: [op for op in ops if op.name.startswith("_backward_") == back] for back in (False, True)}
    match = {False: match_forward, True: match_backward}
    return graph, {back: list(zip(group, match[back](graph, group), strict=True)) for back, group in groups.items()}


@pytest.mark.parametrize("model", ["resnet18_v1", "inceptionv3"])
def test_every_operator_of_a_real_branched_model_is_matched_as_a_serial_engine_ran_it(model):
    graph, matches = branched_model(model, "serial")
    nodes = [i for i, op in enumerate(graph.ops) if op != "null"]
    assert [node for _, node in matches[False] if node >= 0] == nodes
    with_backward = [node for node in nodes if graph.ops[node] != "elemwise_add"]  # a sum's gradient is passed on
    assert [node for _, node in matches[True] if node >= 0] == with_backward[::-1]


@pytest.mark.parametrize("model", ["resnet18_v1", "inceptionv3"])
def test_every_operator_of_a_real_branched_model_is_matched_when_branches_interleave(model):
    graph, matches = branched_model(model, "threaded")
    nodes = {i for i, op in enumerate(graph.ops) if op != "null"}
    assert {node for _, node in matches[False]} - {-1} == nodes
    assert {node for _, node in matches[True]} - {-1} == {node for node in nodes if graph.ops[node] != "elemwise_add"}
    # The same convolution takes about as long under both engines, others differ by up to 100 times.
    serial = branched_model(model, "serial")[1]
    for back in (False, True):
        lengths = [{node: op.end_us - op.start_us for op, node in of[back] if "Convolution" in op.name} for of in (matches, serial)]
        near = [0.4 < lengths[0][node] / lengths[1][node] < 2.5 for node in lengths[0]]
        assert np.mean(near) > 0.85
