"""Every kind of job passes the conformance kit, each with a real recording."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample import sample

from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import Trace
from dpro_search.kinds import PlanOptions, byteps, ddp, fsdp, horovod, imported, kinds, kvstore
from tests.kinds.conformance import KindConformance
from tests.recordings import trace_of

SHARED = Path(__file__).parents[3] / "shared" / "traces"


class TestHorovod(KindConformance):
    kind = horovod.KIND
    timeline_error = 0.01  # the runtime's state machine, and a graph of the recorded ops

    @classmethod
    def recording(cls) -> Trace:
        return sample()


class TestHorovodOnMxnet(KindConformance):
    kind = horovod.KIND
    timeline_error = 0.1
    options = PlanOptions()

    @classmethod
    def recording(cls) -> Trace:
        return trace_of("mxnet_horovod_mlp")


class TestDdp(KindConformance):
    kind = ddp.KIND
    unmoved = ("compression",)  # PowerSGD and halves of 54 kB are lost in the variation of latencies

    @classmethod
    def recording(cls) -> Trace:
        return trace_of("ddp_mlp")


class TestFsdp(KindConformance):
    kind = fsdp.KIND

    @classmethod
    def recording(cls) -> Trace:
        return trace_of("fsdp_mlp")


class TestKvstore(KindConformance):
    kind = kvstore.KIND

    @classmethod
    def recording(cls) -> Trace:
        return trace_of("kvstore_mlp")


class TestByteps(KindConformance):
    kind = byteps.KIND
    unmoved = ("credit",)  # it orders partitions before the push, where a worker on a CPU loses no time

    @classmethod
    def recording(cls) -> Trace:
        return trace_of("byteps_mlp")


class TestImported(KindConformance):
    kind = imported.KIND
    timeline_error = 0.01  # the iteration is the mean of two middle steps, of which the timeline shows the longer one
    unmoved = ("communication=0",)  # the job of one rank has none

    @classmethod
    def recording(cls) -> Trace:
        if not SHARED.is_dir():
            pytest.skip("real traces are not beside the repository (shared/traces)")
        return import_trace([SHARED / "kineto_single" / "convnet_v100_ns_timestamps.json.gz"])


def test_the_last_kind_takes_any_trace() -> None:
    assert kinds()[-1] is imported.KIND
