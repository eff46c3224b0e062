"""What readers tell of collectives, process groups, element types, shapes and roles: on real recordings."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from importer_kit import shared_trace
from kineto_files import COLLECTIVES, START, Profile, distributed

from dpro_search.collect.readers.kineto import importer as kineto
from dpro_search.collect.trace import CollectiveKind, EventKind, ProcessGroup, Role, Trace
from tests.recordings import trace_of
from tests.sample import horovod_trace_path

SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def counted(trace: Trace, *kinds: EventKind) -> Counter:
    """How many events of some kinds there are of each (kind of collective, element type)."""
    events = trace.events.select(np.isin(trace.events.kind, kinds))
    pairs = zip(events.collective_kind.tolist(), events.dtype.tolist(), strict=True)
    return Counter((CollectiveKind(kind).name, trace.dtypes[dtype] if dtype >= 0 else "") for kind, dtype in pairs)


def roles(trace: Trace, *kinds: EventKind) -> Counter:
    return Counter(Role(role).name for role in trace.events.role[np.isin(trace.events.kind, kinds)].tolist())


class TestKineto:
    def test_the_call_of_the_library_distinguishes_an_all_to_all_from_a_message(self):
        # The kernels are named SendRecv; the spans around their launches are named nccl:all_to_all.
        counts = counted(shared_trace("kineto_dlrm_8ranks"), EventKind.COLLECTIVE)
        assert Counter(kind for kind, _ in counts.elements()) == {"ALL_TO_ALL": 40, "ALL_REDUCE": 24}

    def test_element_types_of_collectives_without_sizes_are_those_of_the_inputs(self):
        assert {dtype for _, dtype in counted(shared_trace("kineto_dlrm_8ranks"), EventKind.COLLECTIVE)} == {
            "float32",
            "int32",
            "int64",
        }

    def test_where_all_ranks_are_there_those_in_one_collective_are_a_group(self):
        trace = shared_trace("kineto_dlrm_8ranks")
        group = ProcessGroup(ranks=tuple(range(8)), size=8)
        assert trace.groups == (group,)
        assert (trace.events.group[trace.events.kind == EventKind.COLLECTIVE] == 0).all()

    def test_groups_are_as_recorded(self):
        trace = shared_trace("kineto_single/ddp_resnet50_a100_rank0of2.json.gz")
        assert trace.groups == (ProcessGroup(name="0", description="default_pg", ranks=(0, 1), size=2),)
        assert counted(trace, EventKind.COLLECTIVE) == {
            ("ALL_REDUCE", "float32"): 15,
            ("BROADCAST", "float32"): 3,
            ("BROADCAST", "int64"): 3,
        }

    def test_a_rank_alone_has_no_group_that_is_not_recorded(self):
        trace = shared_trace("kineto_single/torchrec_a100_rank3of8.json.gz")
        assert trace.groups == ()
        assert counted(trace, EventKind.COLLECTIVE).total() == 60

    def test_shapes_are_those_of_the_inputs_of_an_op(self):
        trace = shared_trace("kineto_single/torchrec_a100_rank3of8.json.gz")
        ops = np.flatnonzero(np.array([name == "aten::addmm" for name in trace.names])[trace.events.name])
        known = {trace.shapes[code][1:3] for code in trace.events.shapes[ops].tolist() if code >= 0}
        assert known
        assert all(len(a) == len(b) == 2 and a[1] == b[0] for a, b in known)  # a bias, and two matrices that fit

    def test_shapes_of_the_first_versions_have_another_key(self):
        trace = shared_trace("kineto_single/resnet50_v100_workers0.json.gz")
        convolutions = np.array([name == "aten::conv2d" for name in trace.names])[trace.events.name]
        assert {trace.shapes[code][1][2:] for code in trace.events.shapes[convolutions].tolist()} == {(7, 7), (3, 3), (1, 1)}

    def test_no_shapes_where_they_were_not_recorded(self):
        assert shared_trace("kineto_single/ddp_resnet50_a100_rank0of2.json.gz").shapes == ()

    def test_the_optimizer_is_recognised(self):
        trace = shared_trace("kineto_single/ddp_resnet50_a100_rank0of2.json.gz")
        assert roles(trace, EventKind.OP)["UPDATE"] == 3  # steps

    def test_an_abridged_list_of_ranks_leaves_their_number(self, tmp_path):
        about = {"Collective name": "_allgather_base", "In msg nelems": 8, "Out msg nelems": 512, "dtype": "BFloat16"}
        about |= {"Process Group Name": "7", "Process Group Description": "mesh_tp", "Group size": 64}
        trace = one_kernel(tmp_path, "ncclDevKernel_AllGather_RING_LL()", {**about, "Process Group Ranks": "[0, 1, ..., 63]"})
        assert trace.groups == (ProcessGroup(name="7", description="mesh_tp", size=64),)
        assert counted(trace, EventKind.COLLECTIVE) == {("ALL_GATHER", "bfloat16"): 1}

    @pytest.mark.parametrize("listed", ["[0, 0]", "[-1, 2]", "[0, 1, 2]", "[1e9, 4]", "7"])
    def test_a_list_of_ranks_that_cannot_be_leaves_their_number(self, tmp_path, listed):
        about = {"Collective name": "allreduce", "Process Group Name": "7", "Group size": 2, "Process Group Ranks": listed}
        trace = one_kernel(tmp_path, "ncclDevKernel_AllReduce_Sum_f32_RING_LL()", about)
        assert trace.groups == (ProcessGroup(name="7", size=2),)

    def test_a_message_is_what_it_was_posted_as(self, tmp_path):
        assert counted(one_kernel(tmp_path, SEND_RECV, {"Collective name": "send"}), EventKind.COLLECTIVE) == {("SEND", ""): 1}

    def test_a_kernel_that_does_not_tell_is_unknown(self, tmp_path):
        assert counted(one_kernel(tmp_path, SEND_RECV, {}), EventKind.COLLECTIVE) == {("UNKNOWN", ""): 1}


def one_kernel(folder: Path, name: str, about: dict) -> Trace:
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel(name, START + 100, 50, launched=START + 10, stream=COLLECTIVES, **about)
    return kineto.read([profile.write(folder / "rank0.json", header=distributed(0, 2))])


class TestOtherImports:
    def test_a_table_of_operations_gives_messages_collectives_and_passes(self):
        trace = shared_trace("stragglers/trace-ST.parquet")
        assert counted(trace, EventKind.COLLECTIVE) == {
            ("SEND", ""): 1536,
            ("RECV", ""): 1536,
            ("ALL_GATHER", ""): 256,
            ("REDUCE_SCATTER", ""): 256,
            ("ALL_REDUCE", ""): 384,
            ("UNKNOWN", ""): 256,  # "optimizer-clip-main-grad" does not say what it is
        }
        assert roles(trace, EventKind.KERNEL) == {"FORWARD": 1024, "BACKWARD": 1024, "UPDATE": 256}

    def test_data_parallel_peers_of_a_stage_are_a_group(self):
        trace = shared_trace("stragglers/trace-ST.parquet")
        gathers = trace.events.collective_kind == CollectiveKind.ALL_GATHER
        groups = {trace.groups[number].ranks for number in trace.events.group[gathers].tolist()}
        assert groups == {(0, 1), (2, 3), (4, 5), (6, 7)}
        messages = np.isin(trace.events.collective_kind, (CollectiveKind.SEND, CollectiveKind.RECV))
        assert (trace.events.group[messages] == -1).all()

    def test_chakra_numbers_its_collectives(self):
        counts = counted(shared_trace("other_formats/chakra.0.et.gz"), EventKind.COLLECTIVE)
        assert counts == {("ALL_REDUCE", ""): 5, ("BROADCAST", ""): 2}

    def test_a_profile_without_collectives_has_none(self):
        trace = shared_trace("other_formats/jax_conv_8xMI300X.xplane.pb")
        assert (trace.events.collective_kind == CollectiveKind.UNKNOWN).all()

    def test_a_horovod_timeline_is_of_all_reduces(self):
        trace = shared_trace("tensorflow_horovod_2/rank0.horovod_timeline.json.gz")
        counts = counted(trace, *(kind for kind in EventKind if kind not in (EventKind.CYCLE, EventKind.OP)))
        assert set(counts) == {("ALL_REDUCE", "float32")}
        assert trace.groups == ()  # rank 0 wrote it: which ranks took part is not known

    def test_graphs_of_horovod_tell_operations_types_and_ranks(self):
        trace = shared_trace(*(f"tensorflow_horovod_2/rank{rank}.v1_session_full_trace.pb.gz" for rank in (0, 1)))
        assert set(counted(trace, EventKind.COMM)) == {("ALL_REDUCE", "float32")}
        assert trace.groups == (ProcessGroup(ranks=(0, 1), size=2),)

    def test_byteps_pushes_and_pulls(self):
        counts = counted(shared_trace("byteps_mxnet_2x2"), EventKind.COLLECTIVE)
        assert counts[("PUSH", "")] == counts[("PULL", "")] > 0
        assert counts.total() == 2 * counts[("PUSH", "")]

    def test_a_store_of_mxnet_has_pushes_pulls_passes_and_updates(self):
        files = ("worker0.json.gz", "worker1.json.gz", "server0.json.gz", "symbol.json")
        trace = shared_trace(*(f"mxnet_kvstore/{name}" for name in files))
        assert {kind for kind, _ in counted(trace, EventKind.COLLECTIVE)} == {"PUSH", "PULL"}
        assert {"FORWARD", "BACKWARD"} <= set(roles(trace, EventKind.KERNEL))
        assert {"COPY", "UPDATE", "UNKNOWN"} <= set(roles(trace, EventKind.SERVER))  # sums have no role


class TestRecordings:
    def test_ddp_all_reduces_its_buckets(self):
        trace = trace_of("ddp_mlp")
        assert set(counted(trace, EventKind.COMM)) == {("ALL_REDUCE", "float32")}
        assert {kind for kind, _ in counted(trace, EventKind.COLLECTIVE, EventKind.ALLREDUCE)} == {
            "ALL_REDUCE",
            "BROADCAST",
        }
        assert trace.groups == (ProcessGroup(ranks=(0, 1), size=2),)

    def test_ddp_copies_each_gradient_out_of_its_bucket(self):
        trace = trace_of("ddp_mlp")
        assert roles(trace, EventKind.OP)["COPY"] == (trace.events.kind == EventKind.COMM).sum()

    def test_fsdp_gathers_before_both_passes_and_scatters_gradients(self):
        trace = trace_of("fsdp_mlp")
        events = trace.events.select(trace.events.kind == EventKind.COLLECTIVE)
        counts = Counter(zip(events.collective_kind.tolist(), events.role.tolist(), strict=True))
        assert set(counts) == {
            (CollectiveKind.ALL_GATHER, Role.FORWARD),
            (CollectiveKind.ALL_GATHER, Role.BACKWARD),
            (CollectiveKind.REDUCE_SCATTER, Role.BACKWARD),
        }

    def test_fsdp_copies_in_before_a_gather_and_out_after_it(self):
        events = trace_of("fsdp_mlp").events
        gathers = events.select((events.kind == EventKind.COLLECTIVE) & (events.collective_kind == CollectiveKind.ALL_GATHER))
        span = {
            (rank, number): (start, end)
            for rank, number, start, end in zip(gathers.rank, gathers.collective, gathers.start_us, gathers.end_us, strict=True)
        }
        copies = events.select((events.kind == EventKind.OP) & (events.role == Role.COPY))
        ours = [span[key] for key in zip(copies.rank, copies.collective, strict=True)]
        before = [copy_us < start_us for copy_us, (start_us, _) in zip(copies.start_us, ours, strict=True)]
        assert sum(before) == len(gathers) == len(copies) / 2

    def test_the_types_of_collectives_follow_from_the_execution_trace(self):
        trace = trace_of("fsdp_mlp")
        assert {dtype for _, dtype in counted(trace, EventKind.COLLECTIVE)} == {"float32"}

    def test_horovod_of_mxnet_gives_all_reduces_ranks_passes_and_updates(self):
        trace = trace_of("mxnet_horovod_mlp")
        assert set(counted(trace, EventKind.COMM, EventKind.ALLREDUCE)) == {("ALL_REDUCE", "float32")}
        assert trace.groups == (ProcessGroup(ranks=(0, 1), size=2),)
        assert {"FORWARD", "BACKWARD", "UPDATE"} <= set(roles(trace, EventKind.OP))
        assert 0 < trace.graphs[0].backward.sum() < len(trace.graphs[0].name)

    def test_byteps_gives_passes_and_updates(self):
        trace = trace_of("byteps_mlp")
        assert set(roles(trace, EventKind.KERNEL)) == {"FORWARD", "BACKWARD", "UPDATE"}
        assert {kind for kind, _ in counted(trace, EventKind.COPY)} == {"REDUCE", "BROADCAST", "UNKNOWN"}
        assert set(counted(trace, EventKind.COMM)) == {("UNKNOWN", "float32")}  # a push-pull is two messages

    def test_the_sample_has_no_group_which_version_1_did_not_have(self):
        assert Trace.load(horovod_trace_path()).groups == ()
