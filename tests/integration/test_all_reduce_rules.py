"""Open MPI follows the rules of an exported plan: what ranks send tells which algorithm adds up."""

import os
import shutil
import sys

import pytest

from dpro_search.collect.launch.mpi import run_mpi_job
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.costmodel.collectives.counts import Algorithm, counts
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.parts.horovod import HOROVOD
from dpro_search.deploy.parts.part import JobFacts
from dpro_search.space.plan import Plan

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="shaped hosts need root, ip and tc"),
    pytest.mark.skipif(not shutil.which("mpirun"), reason="OpenMPI is not installed"),
]
RANKS, CALLS = 4, 8
SMALL, LARGE = 1 << 18, 1 << 20
SENT = """
import ctypes, sys
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
handle = lambda name: ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))
sent = lambda: next(int(line.split()[9]) for line in open("/proc/net/dev") if line.strip().startswith("eth0"))
mpi.MPI_Init(None, None)
world, kind, add = map(handle, ("ompi_mpi_comm_world", "ompi_mpi_float", "ompi_mpi_op_sum"))
rank = ctypes.c_int()
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
for size in map(int, sys.argv[2:]):
    buffer = (ctypes.c_float * (size // 4))()
    buffer[0] = buffer[size // 4 - 1] = rank.value + 1
    reduce = lambda: mpi.MPI_Allreduce(ctypes.c_void_p(1), buffer, size // 4, kind, add, world)
    reduce(), mpi.MPI_Barrier(world)
    total = buffer[0], buffer[size // 8], buffer[size // 4 - 1]
    before = sent()
    for _ in range(int(sys.argv[1])):
        reduce()
    print(size, (sent() - before) / size / int(sys.argv[1]), *total, flush=True)
mpi.MPI_Finalize()
"""


def bytes_sent(plan, folder, *, ranks_per_host=1, sizes=(SMALL, LARGE)) -> list[float]:
    """What a host sends for each byte of an all-reduce under an exported plan, by size: the mean over ranks. Sums must be right."""
    exported = export_plan(plan, folder / "plan", (HOROVOD,), facts(ranks_per_host))
    command = (sys.executable, "-c", SENT, str(CALLS), *map(str, sizes))
    spec = JobSpec(
        command=command,
        ranks=RANKS,
        ranks_per_host=ranks_per_host,
        cores=default_cores(RANKS, ranks_per_host),
        env=dict(exported.env),
        timeout_s=120,
    )
    with ShapedHosts(spec.hosts) as hosts:
        run_mpi_job(spec, folder / "run", hosts=hosts)
    lines = [(folder / "run" / f"rank{rank}" / "log").read_text().split("\n")[: len(sizes)] for rank in range(RANKS)]
    columns = [[[float(word) for word in line.split()] for line in of_size] for of_size in zip(*lines, strict=True)]
    assert all(row[2:] == [10, 0, 10] for rows in columns for row in rows)
    assert [rows[0][0] for rows in columns] == list(sizes)
    return [sum(row[1] for row in rows) / RANKS for rows in columns]


def facts(ranks_per_host: int) -> JobFacts:
    return JobFacts(on_mpi=True, ranks=RANKS, ranks_per_host=ranks_per_host)


def on_link(algorithm: Algorithm, ranks_per_host: int = 1) -> float:
    return pytest.approx(float(counts(algorithm, RANKS, ranks_per_host=ranks_per_host).wire), rel=0.12)


def test_sizes_are_added_up_as_the_plan_says(tmp_path):
    sent = bytes_sent(Plan.of(allreduce_algorithms=((0, "recursive-doubling"), (LARGE, "ring"))), tmp_path)
    assert sent == [on_link(Algorithm.RECURSIVE_DOUBLING), on_link(Algorithm.RING)]


def test_another_plan_of_the_same_sizes_sends_other_bytes(tmp_path):
    small, large = bytes_sent(Plan.of(allreduce_algorithms=((0, "ring"), (LARGE, "recursive-doubling"))), tmp_path)
    assert large > 1.2 * small


@pytest.mark.parametrize(
    ("ranges", "sent"),
    [
        (((0, "hierarchy"),), (1, 1, 1)),
        (((0, "ring"), (LARGE, "hierarchy")), (1.5, 1, 1.5)),
        (((0, "hierarchy"), (LARGE, "ring")), (1, 1.5, 1)),
    ],
)
def test_sizes_in_a_hierarchy_and_others_send_what_they_should_over_the_links_of_two_hosts(ranges, sent, tmp_path):
    sent_bytes = bytes_sent(Plan.of(allreduce_algorithms=ranges), tmp_path, ranks_per_host=2, sizes=(SMALL, LARGE, SMALL))
    assert sent_bytes == [pytest.approx(share, rel=0.12) for share in sent]


def test_algorithms_that_know_no_hosts_send_over_their_links_what_the_counts_say(tmp_path):
    plan = Plan.of(allreduce_algorithms=((0, "recursive-doubling"), (LARGE, "rabenseifner")))
    doubling, halving = on_link(Algorithm.RECURSIVE_DOUBLING, 2), on_link(Algorithm.HALVING_DOUBLING, 2)
    assert bytes_sent(plan, tmp_path, ranks_per_host=2) == [doubling, halving]
