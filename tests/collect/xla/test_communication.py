"""Collectives, asynchronous pairs and transfers to the host in programs that JAX compiled, against what the programs say."""

from collections import Counter

import pytest

from dpro_search.collect.readers.xla import async_operations, collectives, host_transfers, parse_hlo, scheduled_computations
from dpro_search.graph.hlo import executions, program_work
from tests.collect.xla.known import LAYERS, TARGETS, WIDTH, facts, known_collectives, module, names, read_collectives

BF16 = 2


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("program", ["collectives", "scan", "prefetch"])
def test_kinds_sizes_groups_and_counts_are_those_of_the_program(program, target):
    assert read_collectives(module(program, target)) == known_collectives(program, target)


@pytest.mark.parametrize("target", TARGETS[1:])
def test_a_ragged_all_to_all(target):
    assert read_collectives(module("ragged", target)) == known_collectives("ragged", target)


@pytest.mark.parametrize("target", TARGETS)
def test_the_partitioners_notations_name_rows_and_columns_of_the_mesh(target):
    read = module("sharded", target)
    along = {1: {(0, 1), (2, 3), (4, 5), (6, 7)}, 2: {(0, 2, 4, 6), (1, 3, 5, 7)}}
    for one in collectives(read):
        assert {tuple(group) for group in one.device_groups.tolist()} in along.values(), one
    texts = {one.op.attributes["replica_groups"][:4] for one in collectives(read)}
    assert "mesh" in texts
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("target", "asynchronous"),
    [
        ("cpu", set()),
        ("v5e_2x4", {"collective-permute"}),
        ("tpu7x_2x2x1", {"all-gather", "all-reduce", "reduce-scatter", "collective-permute"}),
        ("h100_1x1x8", {"all-gather", "reduce-scatter"}),  # the others are pairs whose start waits (is_sync)
    ],
)
def test_which_collectives_proceed_beside_others(target, asynchronous):
    read = collectives(module("collectives", target))
    assert {one.kind for one in read if one.is_async} == asynchronous
    assert all(one.done is not None for one in read if one.is_async)
    assert all(one.reduction == ("add" if one.kind in ("all-reduce", "reduce-scatter") else "") for one in read)


def test_sparse_cores_run_collectives_of_tpu7x():
    threads = Counter((one.thread, one.start.opcode) for one in collectives(module("collectives", "tpu7x_2x2x1")))
    assert threads == {("sparsecore", "call-start"): 3, ("main", "collective-permute-start"): 1, ("main", "all-to-all"): 1}


def test_gathers_that_a_tpu_spreads_over_fusions_are_one_each():
    read = module("prefetch", "v5e_2x4")
    chains = [one for one in async_operations(read, read.entry) if one.start.opcode == "fusion"]
    copies = [one for computation in read.computations.values() for one in computation if one.opcode == "all-gather"]
    assert len(chains) == 3
    assert all(len(one.updates) == 1 for one in chains)  # the matrix product beside which it proceeds
    assert len(copies) == 1 + 3 * len(chains)  # one stands alone, because nothing precedes it
    assert sorted(one.is_async for one in collectives(read) if one.kind == "all-gather") == [False, True, True, True]


def test_a_reduce_scatter_that_is_a_fusion_is_one():
    (one,) = [one for one in collectives(module("sharded", "v5e_2x4")) if one.kind == "reduce-scatter"]
    assert (one.start.opcode, one.op.opcode) == ("fusion", "all-reduce")
    assert one.operand_bytes == 2 * one.output_bytes
    assert one.group_size == 2


@pytest.mark.parametrize(("program", "target"), names())
def test_every_start_has_an_end_behind_it(program, target):
    read = module(program, target)
    for computation in scheduled_computations(read):
        place = {instruction.name: number for number, instruction in enumerate(computation)}
        operations = async_operations(read, computation)
        for one in operations:
            assert one.done is not None
            assert place[one.done.name] > place[one.start.name]
        ends = [one.done.name for one in operations]
        assert len(set(ends)) == len(ends)
        assert {one.name for one in computation if one.opcode.endswith("-done")} <= set(ends)


@pytest.mark.parametrize("target", ["v5e_2x4", "tpu7x_2x2x1"])
def test_weights_come_from_the_host_and_results_go_there(target):
    moved = [(one.to_host, one.bytes) for one in host_transfers(module("offload", target))]
    assert sorted(moved) == [(False, 1024 * 1024 * BF16), (True, 256 * 1024 * BF16)]
    assert facts("offload", target)["memory"]["host_argument_size_in_bytes"] == 1024 * 1024 * BF16


@pytest.mark.parametrize("target", ["v5e_2x4", "tpu7x_2x2x1"])
def test_offloaded_activations_move_once_a_layer_in_each_direction(target):
    read = module("offloaded_scan", target)
    times = executions(read)
    moved: Counter[bool] = Counter()
    for one in host_transfers(read):
        assert one.bytes == 256 * WIDTH * BF16
        moved[one.to_host] += times[one.computation.name]
    assert moved == {True: LAYERS, False: LAYERS}


REPLICAS = """HloModule replicas, is_scheduled=true, replica_count=2, num_partitions=2

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

ENTRY main {
  x = f32[8]{0} parameter(0)
  of_replicas = f32[8]{0} all-reduce(x), replica_groups={{0,1}}, to_apply=add
  of_all_replicas = f32[8]{0} all-reduce(x), replica_groups={}, to_apply=add
  of_partitions = f32[8]{0} all-to-all(x), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  of_devices = f32[8]{0} all-reduce(x), channel_id=2, replica_groups={{0,3},{1,2}}, use_global_device_ids=true, to_apply=add
  of_both = f32[8]{0} all-reduce(x), channel_id=3, replica_groups={{0},{1}}, to_apply=add
  ROOT permuted = f32[8]{0} collective-permute(x), channel_id=4, source_target_pairs={{0,1}}
}
"""


def test_groups_number_replicas_partitions_or_devices():
    (read,) = parse_hlo(REPLICAS)
    groups = {one.op.name: one.device_groups.tolist() for one in collectives(read) if one.device_groups is not None}
    assert groups == {
        "of_replicas": [[0, 2], [1, 3]],
        "of_all_replicas": [[0, 2], [1, 3]],
        "of_partitions": [[0, 1], [2, 3]],
        "of_devices": [[0, 3], [1, 2]],
        "of_both": [[0, 1], [2, 3]],
    }
    assert collectives(read)[-1].pairs.tolist() == [[0, 1], [2, 3]]


GENERIC = """HloModule generic, is_scheduled=true, num_partitions=4

%wrapped (p: f32[8]) -> f32[32] {
  %p = f32[8]{0} parameter(0)
  ROOT %gather = f32[32]{0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true
}

ENTRY %main (x: f32[8]) -> f32[32] {
  %x = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[32]{0}, u32[]) async-start(%x), calls=%wrapped
  %update = ((f32[8]{0}), f32[32]{0}, u32[]) async-update(%start)
  %sent = (f32[8]{0}, u32[], token[]) send(%x), channel_id=2, is_host_transfer=true
  %sent.done = token[] send-done(%sent), channel_id=2, is_host_transfer=true
  ROOT %done = f32[32]{0} async-done(%update)
}
"""


def test_an_asynchronous_computation_is_followed_through_its_updates():
    (read,) = parse_hlo(GENERIC)
    (gather,) = collectives(read)
    assert (gather.kind, gather.operand_bytes, gather.output_bytes, gather.start.name) == ("all-gather", 32, 128, "start")
    assert gather.done is not None
    assert gather.done.name == "done"
    assert gather.is_async
    operations = async_operations(read, read.entry)
    assert [(one.start.name, [update.name for update in one.updates], one.done.name) for one in operations] == [
        ("start", ["update"], "done"),
        ("sent", [], "sent.done"),
    ]
    (sent,) = host_transfers(read)
    assert (sent.to_host, sent.bytes) == (True, 32)


CHAIN = """HloModule chain, is_scheduled=true, num_partitions=4

%begin (p: f32[8]) -> (f32[8], f32[32]) {
  %p = f32[8]{0} parameter(0)
  %g = f32[32]{0} all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}, use_global_device_ids=true, ATTRIBUTES
  ROOT %s = (f32[8]{0}, f32[32]{0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%advance (p.1: f32[8], q: f32[4]) -> (f32[4], f32[8], f32[32]) {
  %p.1 = f32[8]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %n = f32[4]{0} negate(%q)
  %g.1 = f32[32]{0} all-gather(%p.1), channel_id=1, replica_groups={}, dimensions={0}, use_global_device_ids=true, ATTRIBUTES
  ROOT %t = (f32[4]{0}, f32[8]{0}, f32[32]{0}) tuple(%n, %p.1, %g.1)
}

%end (p.2: f32[8], r: f32[32]) -> f32[32] {
  %p.2 = f32[8]{0} parameter(0)
  %r = f32[32]{0} parameter(1)
  %g.2 = f32[32]{0} all-gather(%p.2), channel_id=1, replica_groups={}, dimensions={0}, use_global_device_ids=true, ATTRIBUTES
  ROOT %d = f32[32]{0} custom-call(%p.2, %r, %g.2), custom_call_target="AsyncCollectiveDone"
}

%body (b: (f32[8], f32[32], f32[4])) -> (f32[8], f32[32], f32[4]) {
  %b = (f32[8]{0}, f32[32]{0}, f32[4]{0}) parameter(0)
  %b0 = f32[8]{0} get-tuple-element(%b), index=0
  %b2 = f32[4]{0} get-tuple-element(%b), index=2
  %u = (f32[4]{0}, f32[8]{0}, f32[32]{0}) fusion(%b0, %b2), kind=kCustom, calls=%advance
  %u0 = f32[4]{0} get-tuple-element(%u), index=0
  %u2 = f32[32]{0} get-tuple-element(%u), index=2
  ROOT %next = (f32[8]{0}, f32[32]{0}, f32[4]{0}) tuple(%b0, %u2, %u0)
}

%until (c: (f32[8], f32[32], f32[4])) -> pred[] {
  %c = (f32[8]{0}, f32[32]{0}, f32[4]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[8], y: f32[4]) -> f32[32] {
  %x = f32[8]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %start = (f32[8]{0}, f32[32]{0}) fusion(%x), kind=kCustom, calls=%begin
  %s0 = f32[8]{0} get-tuple-element(%start), index=0
  %s1 = f32[32]{0} get-tuple-element(%start), index=1
  %state = (f32[8]{0}, f32[32]{0}, f32[4]{0}) tuple(%s0, %s1, %y)
  %loop = (f32[8]{0}, f32[32]{0}, f32[4]{0}) while(%state), condition=%until, body=%body
  %l0 = f32[8]{0} get-tuple-element(%loop), index=0
  %l1 = f32[32]{0} get-tuple-element(%loop), index=1
  ROOT %done = f32[32]{0} fusion(%l0, %l1), kind=kCustom, calls=%end
}
""".replace("ATTRIBUTES", 'frontend_attributes={chain_id="3"}')


def test_a_chain_of_fusions_may_lead_through_a_loop():
    (read,) = parse_hlo(CHAIN)
    (gather,) = collectives(read)
    assert (gather.start.name, gather.done.name, gather.operand_bytes, gather.output_bytes) == ("start", "done", 32, 128)
    work = program_work(read, each_loop_once=True)
    assert (work.read_bytes, work.written_bytes) == (32 + 16, 128 + 16)  # of the gather once, and of the negation


@pytest.mark.parametrize(("program", "target"), names())
def test_arguments_and_donated_memory_are_the_compilers(program, target):
    read, memory = module(program, target), facts(program, target)["memory"]
    arguments = [one.shape for one in read.entry.parameters]
    assert sum(one.padded_bytes for one in arguments if not one.in_host_memory) == memory["argument_size_in_bytes"]
    assert sum(one.padded_bytes for one in arguments if one.in_host_memory) == memory["host_argument_size_in_bytes"]
    aliased = sum(arguments[one.parameter].padded_bytes for one in read.input_output_alias)
    assert aliased == memory["alias_size_in_bytes"]
    results = [leaf for leaf in read.entry.root.shape.leaves() if not leaf.in_host_memory]
    table = memory["output_size_in_bytes"] - sum(leaf.padded_bytes for leaf in results)
    assert 0 <= table <= max(512, 8 * len(results))  # the addresses of a tuple's elements
