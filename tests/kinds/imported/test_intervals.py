"""Intervals of recorded jobs: what the recording leaves open is part of them, and they never begin below what a device computes."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from dpro_search.collect.readers.importers import import_trace
from dpro_search.graph.measured import recording_doubt, replay_error
from dpro_search.kinds import job_of
from dpro_search.space.plan import Plan
from tests.cli.facts import replayed, replayed_job
from tests.collect.kineto_files import COLLECTIVES, START, Profile, distributed
from tests.every_case import every_case
from tests.in_process import succeeds

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MIB = 1 << 18  # elements of an all-reduce


def asked(job, *changes):
    return replayed_job(job, changes=changes)


def two_ranks(folder, *, steps, clock_us=0.0, ends_late_us=()):
    """Ranks 0 and 1 compute for 600 and 1,200 us, all-reduce for 100 us, then update for 180 us; a step takes 1,500 us.

    Rank 1's clock is ahead; each all-reduce is noted there so much later than it ends.
    """
    late = [*ends_late_us, *[0.0] * steps]
    for rank, backward_us in enumerate((300.0, 900.0)):
        profile = Profile(pid=100 + rank, device=rank)
        for number in range(steps):
            at = START + 1500.0 * number + clock_us * rank
            profile.step(number, at, 1499)
            profile.kernel("forward", at + 10, 300, launched=at + 2, call_us=3)
            profile.kernel("backward", at + 310, backward_us, launched=at + 6, call_us=3)
            profile.call("cudaEventRecord", at + 10, 1)
            profile.call("cudaStreamWaitEvent", at + 12, 1)
            end = at + 1310 + rank * late[number]
            profile.kernel(
                ALL_REDUCE, at + 310 + backward_us, end - (at + 310 + backward_us), launched=at + 14, call_us=3, stream=COLLECTIVES,
                **{"Collective name": "allreduce", "In msg nelems": MIB, "Out msg nelems": MIB, "Group size": 2, "dtype": "Float",
                   "Process Group Name": "0", "Process Group Ranks": "[0, 1]"},
            )  # fmt: skip
            profile.call("cudaEventRecord", at + 18, 1)
            profile.call("cudaStreamWaitEvent", at + 20, 1)
            profile.kernel("adam_update", end, 180, launched=at + 22, call_us=3)
            profile.call("cudaDeviceSynchronize", at + 26, end + 181 - (at + 26))
        profile.write(folder / f"rank{rank}.json", header=distributed(rank, 2))
    return import_trace([folder])


@every_case("steps", [3, 5, 7])
@every_case("clock_us", [0.0, 170.0, -250.0])
def test_a_few_collectives_that_end_together_give_the_measured_iteration(tmp_path, steps, clock_us):
    job = job_of(two_ranks(tmp_path, steps=steps, clock_us=clock_us))
    facts = asked(job)
    assert facts["predicted_iteration_us"] == pytest.approx(1500, abs=5)
    assert facts["breakdown_us"]["exposed_communication"] == pytest.approx(100, abs=5)
    assert facts["recording_doubt"] is None
    assert asked(job, "rank1=usual")["predicted_iteration_us"] == pytest.approx(900, abs=5)


def test_clocks_that_a_few_collectives_leave_open_widen_the_interval_and_are_named(tmp_path):
    steady, open_ = tmp_path / "steady", tmp_path / "open"
    steady.mkdir()
    open_.mkdir()
    known = asked(job_of(two_ranks(steady, steps=3)))
    unknown = asked(job_of(two_ranks(open_, steps=3, ends_late_us=(0.0, 60.0, -60.0))))
    width = [facts["interval_us"][1] - facts["interval_us"][0] for facts in (known, unknown)]
    assert width[1] > 1.2 * width[0]
    assert any("clocks of the ranks are known to within" in sentence for sentence in unknown["assumed"])
    assert not any("clocks" in sentence for sentence in known["assumed"])


def test_clocks_are_named_where_they_may_be_why_the_replay_is_off():
    assert "clocks of the ranks" in recording_doubt(1800, 1500, 400)
    assert "clocks" not in recording_doubt(1800, 1500, 20)
    assert recording_doubt(1600, 1500, 400) is None


def kernels_and_loads(folder, loads_us):
    """One rank: each step loads its input, computes for 100 us on the device and ends."""
    profile, at = Profile(), float(START)
    for number, load_us in enumerate(loads_us):
        profile.step(number, at, load_us + 120)
        profile.add("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, load_us, 100)
        profile.kernel("gemm", at + load_us + 10, 100, launched=at + load_us + 2)
        profile.call("cudaDeviceSynchronize", at + load_us + 8, 104)
        at += load_us + 120
    profile.write(folder / "rank0.json", header=distributed(0, 1))
    return import_trace([folder])


PERIODIC = (10, 10, 10, 900) * 3


def test_the_mean_of_steps_that_stall_is_said_beside_the_median(tmp_path):
    facts = asked(job_of(kernels_and_loads(tmp_path, PERIODIC)))
    assert facts["predicted_iteration_us"] == pytest.approx(130, abs=3)
    assert facts["predicted_mean_us"] == pytest.approx(np.mean(PERIODIC) + 120, abs=3)
    assert facts["measured_mean_us"] == pytest.approx(np.mean(PERIODIC) + 120, abs=3)


def test_an_interval_never_begins_below_what_the_device_computes(tmp_path):
    job = job_of(kernels_and_loads(tmp_path, PERIODIC))
    assert asked(job)["interval_us"][0] >= 100
    assert 50 <= asked(job, "compute=0.5")["interval_us"][0] <= 80


def test_stalls_are_a_finding_with_what_they_cost_on_average(tmp_path):
    facts = msgspec.to_builtins(job_of(kernels_and_loads(tmp_path, PERIODIC)).diagnose())
    first = facts["findings"][0]
    assert first.startswith("3 of 12 steps stall")
    assert "--what-if loading=0" in first
    best = facts["gains"][0]
    assert best["what_if"] == "loading=0"
    assert best["gain_us"] == pytest.approx(np.mean(PERIODIC), abs=5)


def test_a_steady_job_has_one_iteration_time(tmp_path):
    kernels_and_loads(tmp_path, (10,) * 6).save(tmp_path / "trace")
    assert "mean" not in succeeds("replay", tmp_path / "trace")
    facts = json.loads(succeeds("diagnose", tmp_path / "trace", "--json"))
    assert not any("stall" in finding for finding in facts["findings"])


class TestOwnReplayIsOff:
    """The steps of a recording whose own replay is off by a third."""

    def job(self, folder, *, factor):
        job = job_of(two_ranks(folder, steps=5))
        trace = job.trace
        steps, number = trace.steps, trace.steps.index
        later_us = (factor - 1) * 1500.0 * number  # the ends of steps are as much farther apart than what ran in them
        changed = replace(steps, start_us=steps.start_us + later_us, end_us=steps.end_us + later_us)
        return job_of(replace(trace, steps=changed))

    @pytest.mark.parametrize("factor", [0.75, 1.5])
    def test_intervals_of_the_recorded_setting_and_of_changes_include_the_error(self, tmp_path, factor):
        job = self.job(tmp_path, factor=factor)
        for changes in ((), ("compute=0.5",), ("bucket_cap_bytes=1MiB",)):
            facts = asked(job, *changes)
            low, high = (end / facts["predicted_iteration_us"] for end in facts["interval_us"])
            assert low <= factor <= high or low == pytest.approx(factor, abs=0.1)

    def test_gains_of_plans_smaller_than_the_error_are_not_certain(self, tmp_path):
        job = self.job(tmp_path, factor=0.7)
        rows = {row.what_if: row for row in job.diagnose().gains}
        assert not rows["communication=0"].certain
        assert rows["compute=0.5"].certain

    def test_a_job_elsewhere_keeps_the_error_of_the_recorded_one(self, tmp_path):
        job = self.job(tmp_path, factor=1.5)
        moved, _ = job.under(job.job.scenario(["compute=0.5"]))
        assert moved.replay_error == job.replay_error == pytest.approx(1 / 1.5 - 1, abs=0.01)
        _, high = moved.predict(Plan()).interval_us
        assert high >= 1.5 * moved.predict(Plan()).iteration_us * 0.999


def test_errors_of_good_recordings_are_part_of_the_intervals_already():
    assert replay_error(1050, 1000) == 0
    assert replay_error(1200, 1000) == pytest.approx(0.2)
    assert replay_error(1200, None) == 0


class TestOtherDevices:
    """A profile of one rank on a GPU, asked for another cluster."""

    def asked(self, folder, device):
        profile = kernels_and_loads(folder, (10,) * 4)
        trace = replace(profile, meta=msgspec.structs.replace(profile.meta, devices=(device,) if device else ()))
        return replayed(trace, cluster="h200", changes=("loading=0",))

    @pytest.mark.parametrize("device", ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090", "NVIDIA H20"])
    def test_kernels_of_a_gpu_without_a_usual_machine_are_scaled_by_its_data_sheet(self, tmp_path, device):
        facts = self.asked(tmp_path, device)
        assert facts["breakdown_us"]["compute"] != pytest.approx(100, rel=0.05)
        assert any("data sheet of NVIDIA" in sentence for sentence in facts["cluster"]["left_out"])

    @pytest.mark.parametrize("device", ["", "Accelerator 7"])
    def test_an_unknown_gpu_gives_a_wide_interval_that_says_so(self, tmp_path, device):
        facts = self.asked(tmp_path, device)
        low, high = facts["interval_us"]
        assert high > 3 * low
        assert any("the recorded GPU is not known" in sentence for sentence in facts["cluster"]["left_out"])
