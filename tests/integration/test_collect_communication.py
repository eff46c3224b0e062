"""Measuring all-reduces on real backends over shaped hosts: what is asked for is measured once, and crosses the links."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from dpro_search.collect.tables.all_reduces import read_comm_table
from dpro_search.costmodel.collectives.counts import counts
from dpro_search.costmodel.collectives.series import algorithms_of
from dpro_search.errors import InputError
from dpro_search.measure.all_reduces import CommRequest, collect_communication
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.choice import OF_LIBRARY

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="shaped hosts need root, ip and tc"),
]

SIZE = 1 << 20
ENVS = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs")


def request(backend: str, **fields) -> CommRequest:
    usual = {"backends": (backend,), "ranks": (2,), "rates_bps": (1e9,), "sizes_bytes": (4096, SIZE // 8, SIZE), "rounds": 1}
    return CommRequest(**(usual | fields))


def needs(environment: str) -> None:
    if not (ENVS / environment / "bin" / "python").is_file():
        pytest.skip(f"no environment {ENVS / environment}; build it with scripts/make_env.sh {environment}")


@pytest.mark.skipif(not shutil.which("mpirun"), reason="OpenMPI is not installed")
@pytest.mark.parametrize(("ranks_per_host", "more"), [(1, ()), (2, ("hierarchy",))])
def test_open_mpi_runs_the_algorithm_that_it_is_told(ranks_per_host, more, tmp_path):
    out = tmp_path / "t.jsonl"
    progress = collect_communication(request("mpi", ranks=(4,), sizes_bytes=(SIZE,), ranks_per_host=ranks_per_host), out)
    assert progress.complete
    rows = {row.algorithm: row for row in read_comm_table(out).rows}
    for name in ("ring", "recursive-doubling", "rabenseifner", *more):
        (algorithm,) = algorithms_of("mpi", name)
        expected = counts(algorithm, 4.0, ranks_per_host=ranks_per_host).wire * SIZE
        assert rows[name].sent_bytes == pytest.approx(expected, rel=0.1), name


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py (extra mpi)")
@pytest.mark.parametrize(
    ("backend", "tool", "prefix"), [("mpi4py", "mpirun", "open-mpi "), ("mpi4py-mpich", "mpiexec.hydra", "mpich ")]
)
def test_an_mpi_library_runs_the_algorithm_that_it_is_told_beside_ours(backend, tool, prefix, tmp_path):
    if not shutil.which(tool):
        pytest.skip(f"no {tool}")
    out = tmp_path / "t.jsonl"
    assert collect_communication(request(backend, ranks=(4,), sizes_bytes=(SIZE,), longest_s=1.0), out).complete
    rows = {row.algorithm: row for row in read_comm_table(out).rows}
    of_library = [f"{told}{name}" for told in (prefix, OF_LIBRARY) for name in ("ring", "recursive-doubling", "rabenseifner")]
    for name in (*of_library, "halving-doubling", "ring"):
        (algorithm,) = algorithms_of(backend, name)
        assert rows[name].sent_bytes == pytest.approx(counts(algorithm, 4.0).wire * SIZE, rel=0.1), name


@pytest.mark.parametrize(("backend", "environment", "sent"), [("gloo", "torch", 1.0), ("kvstore", "mxnet", 1.0)])
def test_bytes_cross_the_links_and_a_slower_one_takes_longer(backend, environment, sent, tmp_path):
    needs(environment)
    out = tmp_path / "t.jsonl"
    collect_communication(request(backend, rates_bps=(1e8, 1e9)), out)
    slow, fast = (next(r for r in read_comm_table(out).rows if (r.rate_bps, r.size_bytes) == (rate, SIZE)) for rate in (1e8, 1e9))
    assert fast.sent_bytes == pytest.approx(sent * SIZE, rel=0.15)
    assert slow.duration_us > 2 * fast.duration_us
    assert slow.duration_us > 0.9 * SIZE / 12.5
    assert 0 < slow.mean_busy_us <= slow.duration_us


@pytest.mark.skipif(not shutil.which("mpirun"), reason="OpenMPI is not installed")
def test_a_collection_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "t.jsonl"
    first = collect_communication(request("mpi", limit=7), out)
    assert first.rows == 7
    before = {row.key: row for row in read_comm_table(out).rows}
    second = collect_communication(request("mpi"), out)
    assert second.complete
    after = {row.key: row for row in read_comm_table(out).rows}
    assert len(after) == 18
    assert before.items() <= after.items()
    third = collect_communication(request("mpi"), out)
    assert (third.complete, third.new) == (True, 0)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="OpenMPI is not installed")
def test_rounds_go_on_where_they_differ_and_one_algorithm_may_be_named(tmp_path):
    out = tmp_path / "t.jsonl"
    assert collect_communication(request("mpi:ring", rounds=2, sizes_bytes=(1024, SIZE)), out).complete
    rows = read_comm_table(out).rows
    assert {row.algorithm for row in rows} == {"ring"}
    assert not any(row.busy_us for row in rows), "ranks of Open MPI use their cores while they wait"
    assert all(2 <= len(row.rounds_us) <= 6 for row in rows)
    assert all(row.standard_error <= 0.02 or len(row.rounds_us) == 6 for row in rows)


def test_a_table_of_another_machine_is_not_continued(tmp_path):
    needs("torch")
    out = tmp_path / "t.jsonl"
    out.write_text('{"version":2,"kind":"all-reduces","machine":"other","cores":64,"versions":{},"started_at":""}\n')
    with pytest.raises(InputError, match="another machine"):
        collect_communication(request("gloo"), out)
