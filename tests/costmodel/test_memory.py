"""Peak memory of a step: which tensors share a buffer, how long buffers live, what plans do to that."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_steps import floats, node_graph, step

from dpro_search.collect.trace import AllocatorReport, TensorType
from dpro_search.costmodel.memory import cast_elements, peak_bytes
from dpro_search.errors import InputError
from dpro_search.graph.buffers import step_memory
from dpro_search.graph.dataflow import StepMemory
from experiments.costmodel.best_fit import allocator_peak_bytes

FEED = ("x", "_Arg", "")
# Four layers of 100 floats a sample, two samples; each backward op needs its layer's input and result.
CHAIN = (
    FEED,
    ("f1", "MatMul", "x"), ("f2", "MatMul", "f1"), ("f3", "MatMul", "f2"), ("f4", "MatMul", "f3"),
    ("ones", "Fill", ""),
    ("b4", "MatMul", "ones f4 f3"), ("b3", "MatMul", "b4 f2"), ("b2", "MatMul", "b3 f1"), ("b1", "MatMul", "b2 x"),
    ("end", "NoOp", "b1"),
)  # fmt: skip
CHAIN_TYPES = {name: floats(2, 100) for name, op, _ in CHAIN if op != "Fill"}
BACKWARD = ("ones", "b4", "b3", "b2", "b1", "end")
LAYER = 2 * 100 * 4


def chain() -> StepMemory:
    return step(CHAIN, CHAIN_TYPES, backward=BACKWARD)


def test_a_buffer_lives_from_its_op_to_its_last_reader():
    peak = peak_bytes(chain())
    assert (peak.bytes, peak.persistent_bytes, peak.op) == (6 * LAYER, LAYER, "b4")  # x, f1 to f4 and b4


def test_an_op_works_in_place_on_what_nobody_else_will_read():
    types = {"x": floats(2, 100), "a": floats(2, 100), "b": floats(2, 100)}
    alone = step([FEED, ("a", "MatMul", "x"), ("b", "Relu", "a"), ("c", "NoOp", "b")], types)
    assert peak_bytes(alone).bytes == 2 * LAYER
    shared = step([FEED, ("a", "MatMul", "x"), ("b", "Relu", "a"), ("c", "NoOp", "b a")], types)
    assert peak_bytes(shared).bytes == 3 * LAYER
    twice = step([FEED, ("a", "MatMul", "x"), ("b", "Mul", "a a"), ("c", "NoOp", "b")], types)
    assert peak_bytes(twice).bytes == 3 * LAYER


def test_a_view_shares_the_buffer_and_keeps_it_alive():
    types = {"x": floats(2, 100), "a": floats(2, 100), "v": floats(200), "b": floats(2, 100)}
    nodes = [FEED, ("a", "MatMul", "x"), ("v", "Reshape", "a"), ("b", "Relu", "a"), ("c", "NoOp", "b v")]
    assert peak_bytes(step(nodes, types)).bytes == 3 * LAYER


def test_parameters_and_the_batch_stay():
    types = {"x": floats(2, 100), "read": floats(100, 100)}
    recorded_step = step([FEED, ("w", "_Arg", ""), ("read", "ReadVariableOp", "w"), ("y", "NoOp", "x read")], types)
    assert peak_bytes(recorded_step).persistent_bytes == 100 * 100 * 4 + LAYER
    assert recorded_step.batch == 2


def trained(samples: int) -> StepMemory:
    """A layer of 64 inputs and 32 outputs: forward, gradient of the weights, communication, update."""
    nodes = [
        FEED, ("w", "_Arg", ""), ("read", "ReadVariableOp", "w"), ("y", "MatMul", "x read"), ("dy", "Tanh", "y"),
        ("dw", "MatMul", "x dy"), ("flat", "Reshape", "dw"), ("comm", "HorovodAllreduce", "flat"), ("scaled", "Mul", "comm"),
        ("update", "AssignSubVariableOp", "w scaled"),
    ]  # fmt: skip
    types = {"x": floats(samples, 64), "read": floats(64, 32), "y": floats(samples, 32), "dy": floats(samples, 32)}
    types |= {"dw": floats(64, 32), "flat": floats(2048), "comm": floats(2048), "scaled": floats(2048)}
    backward = ("dy", "dw", "flat", "scaled", "update")
    return step(nodes, types, backward=backward, gradients=[8192], workspace={"y": samples * 32 * 4, "dw": 8192})


@pytest.mark.parametrize("samples", [4, 64, 256])
def test_a_batch_that_was_not_recorded_is_predicted_from_one_that_was(samples):
    direct, scaled = peak_bytes(trained(samples)), peak_bytes(trained(16), batch_factor=samples / 16)
    assert scaled == direct


def test_accumulation_divides_activations_and_keeps_sums_of_gradients():
    whole, parts = peak_bytes(trained(1024)), peak_bytes(trained(1024), micro_batches=4)
    assert parts.activation_bytes == whole.activation_bytes / 4
    assert parts.persistent_bytes == whole.persistent_bytes + 8192


def test_dropped_results_are_there_when_they_are_needed_again():
    # For b4 all of f1, f2 and f3 come back: x, f1 to f4, b4.
    assert peak_bytes(chain(), recomputed={"f1", "f2", "f3"}).bytes == 6 * LAYER
    # With f3 kept, f1 and f2 come back for b3, when f3 and f4 have gone: x, f1, f2, b4, b3.
    assert peak_bytes(chain(), recomputed={"f1", "f2"}).bytes == 5 * LAYER


def test_recomputation_keeps_what_it_computes_from():
    # f2 was read last by f3; computing f3 again for b4 needs it once more.
    short = step((*CHAIN[:7], ("end", "NoOp", "b4")), CHAIN_TYPES, backward=BACKWARD)
    kept, again = peak_bytes(short), peak_bytes(short, recomputed={"f3"})
    assert kept.bytes == 4 * LAYER  # x, f3, f4, b4
    assert again.bytes == 5 * LAYER  # and f2


def test_what_the_backward_pass_reads_at_once_keeps_its_first_result():
    """Once b4 waits for no gradient it runs like a forward op: f3 is there until then, and nothing needs it again."""
    at_once = tuple((name, op, inputs.removeprefix("ones ")) for name, op, inputs in CHAIN)
    assert peak_bytes(step(at_once, CHAIN_TYPES, backward=BACKWARD), recomputed={"f3"}).bytes == 6 * LAYER
    assert peak_bytes(step(at_once, CHAIN_TYPES, backward=BACKWARD), recomputed={"f1", "f2"}).bytes == 5 * LAYER


def test_bfloat16_halves_results_and_copies_what_crosses_the_border():
    halved_bytes = peak_bytes(chain(), bfloat16={name for name, op, _ in CHAIN if op == "MatMul"})
    # At the end of the forward pass: x, f1 to f4 and b4 in half; the copy of x for b1 and f1 as well.
    assert halved_bytes.bytes == LAYER + 6 * LAYER / 2
    # f2 itself is gone once its copy for f3 and b3 is made.
    assert peak_bytes(chain(), bfloat16={"f2"}).bytes == 6 * LAYER


def test_what_crosses_the_border_is_cast_once():
    """Beside y: the batch and the weights on their way in, and y for z, which stays in float32. v finds the batch cast already."""
    types = {"x": floats(2, 100), "read": floats(100, 50), "y": floats(2, 50), "z": floats(2, 100), "v": floats(2, 30)}
    nodes = [FEED, ("w", "_Arg", ""), ("read", "ReadVariableOp", "w"), ("y", "MatMul", "x read")]
    nodes += [("z", "MatMul", "y"), ("v", "MatMul", "y x"), ("end", "NoOp", "z v")]
    recorded_step = step(nodes, types)
    assert cast_elements(recorded_step, {"y", "v"}) == {"y": 200 + 5000 + 100, "v": 60}
    assert cast_elements(recorded_step, {"z"}) == {"z": 100 + 200}
    assert cast_elements(recorded_step, ()) == {}


def test_what_the_allocator_does_not_count_is_left_out():
    assert peak_bytes(chain(), smallest_bytes=LAYER + 1).bytes == 0
    assert peak_bytes(chain(), smallest_bytes=LAYER + 1, fusion_buffer_bytes=5000).bytes == 5000


def test_an_unknown_op_and_impossible_numbers_are_refused():
    with pytest.raises(InputError, match="recomputed: op 'gone'"):
        peak_bytes(chain(), recomputed={"gone"})
    with pytest.raises(InputError, match="micro_batches"):
        peak_bytes(chain(), micro_batches=0)


def test_without_types_nothing_is_said():
    graph = node_graph([("a", "MatMul", "")], {}, {})
    assert step_memory(graph, np.zeros(1, np.int64), [(np.zeros(1), np.ones(1))], []) is None


@st.composite
def steps(draw: st.DrawFn) -> StepMemory:
    """A random graph of ops that read earlier ops, some in place, the second half backward."""
    count = draw(st.integers(2, 12))
    nodes, types = [FEED], {"x": floats(2, draw(st.integers(1, 3)))}
    for i in range(count):
        earlier = [name for name, _, _ in nodes]
        inputs = draw(st.lists(st.sampled_from(earlier), min_size=1, max_size=3))
        nodes.append((f"n{i}", draw(st.sampled_from(["MatMul", "AddV2", "Identity"])), " ".join(inputs)))
        kind = draw(st.sampled_from(["float32", "int32"]))
        types[f"n{i}"] = types[inputs[0]] if nodes[-1][1] == "Identity" else TensorType(kind, (2, draw(st.integers(1, 3))))
    return step(nodes, types, backward=[f"n{i}" for i in range(count // 2, count)])


@settings(deadline=None)
@given(steps())
def test_the_peak_is_the_most_that_is_alive_at_any_instant(found):
    alive = np.zeros(found.instants)
    for buffer, size in enumerate(found.size_bytes):
        writers = found.writer_op[found.writer_ptr[buffer] : found.writer_ptr[buffer + 1]]
        readers = found.use_op[found.use_buffer == buffer]
        if found.persistent[buffer]:
            alive += size
        else:
            alive[found.begin[writers[0]] : max(found.end[op] for op in (*writers, *readers))] += size
    assert peak_bytes(found).bytes == alive.max()


@settings(deadline=None)
@given(steps(), st.data())
def test_changes_keep_the_peak_within_bounds(found, data):
    names = [name for name, b in zip(found.op_name, found.backward, strict=True) if not b]
    chosen = data.draw(st.sets(st.sampled_from(names)))
    plain, everything = peak_bytes(found).bytes, found.size_bytes.sum()
    assert peak_bytes(found, recomputed=set()).bytes == plain
    assert found.size_bytes.max() <= peak_bytes(found, recomputed=chosen).bytes <= 2 * everything
    assert peak_bytes(found, bfloat16=chosen).bytes <= 1.5 * everything


def test_the_allocator_rounds_up_and_takes_the_fusion_buffer_once():
    recorded_step = chain()  # pieces of 800 bytes: 1,024 each
    assert allocator_peak_bytes(recorded_step) == 6 * 1024
    # The first region has 2 MiB: what is left of it is cut for a quarter of it, and handed out whole for half of it.
    alone = allocator_peak_bytes(trained(16))
    assert allocator_peak_bytes(trained(16), fusion_buffer_bytes=2**19) == alone + 2**19
    assert allocator_peak_bytes(trained(16), fusion_buffer_bytes=2**20) > alone + 2**20


COUNTED = AllocatorReport(name="mklcpu", peak_bytes=14_800, requested_peak_bytes=10_800, least_bytes=5800)


def test_with_counts_pieces_are_as_much_too_large_as_they_were_and_what_stays_is_as_it_was():
    """5,000 bytes more than the batch stay; of what comes and goes, pieces took 9,000 bytes for 5,000."""
    assert allocator_peak_bytes(chain(), counted=COUNTED) == LAYER + 5000 + 5 * LAYER * 1.8
    assert allocator_peak_bytes(chain(), counted=COUNTED, fusion_buffer_bytes=4096) == LAYER + 5000 + 5 * LAYER * 1.8


@pytest.mark.parametrize("change", [{"batch_factor": 2}, {"micro_batches": 2}])
def test_in_another_first_step_the_fusion_buffers_piece_is_played(change):
    peaks = [allocator_peak_bytes(trained(16), counted=COUNTED, fusion_buffer_bytes=size, **change) for size in (0, 2**19)]
    assert peaks[1] == peaks[0] + 2**19


def test_of_several_recorded_steps_the_one_that_takes_the_most_tells():
    graph = node_graph([FEED, ("a", "MatMul", "x"), ("b", "MatMul", "x"), ("end", "NoOp", "a b")], CHAIN_TYPES | {
        "a": floats(2, 100), "b": floats(2, 100),
    }, {})  # fmt: skip
    begin = np.array([np.nan, 0.0, 10.0, 20.0])
    early = (begin, np.array([np.nan, 5.0, 15.0, 25.0]))
    memory_use = step_memory(graph, np.zeros(4, np.int64), [early, (begin + 5, early[1] + 5)], [])
    assert memory_use is not None
    assert peak_bytes(memory_use).bytes == 3 * LAYER
