"""Open MPI follows the rules of an exported plan: what ranks send tells which algorithm adds up."""

import os
import shutil
import sys

import pytest

from dpro_search.collect.launch.mpi import run_mpi_job
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.costmodel.collectives import Algorithm, counts
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.targets import JobFacts, Target
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
for size in map(int, sys.argv[2:]):
    buffer = (ctypes.c_char * size)()
    reduce = lambda: mpi.MPI_Allreduce(ctypes.c_void_p(1), buffer, size // 4, kind, add, world)
    reduce(), mpi.MPI_Barrier(world)
    before = sent()
    for _ in range(int(sys.argv[1])):
        reduce()
    print(size, (sent() - before) / size / int(sys.argv[1]), flush=True)
mpi.MPI_Finalize()
"""


def bytes_sent(env, out) -> dict[int, float]:
    """What a rank sends for each byte of an all-reduce, by size: the mean over ranks."""
    command = (sys.executable, "-c", SENT, str(CALLS), str(SMALL), str(LARGE))
    with ShapedHosts(RANKS) as hosts:
        run_mpi_job(JobSpec(command=command, ranks=RANKS, env=dict(env), timeout_s=120), out, hosts=hosts)
    found: dict[int, float] = {SMALL: 0.0, LARGE: 0.0}
    for rank in range(RANKS):
        for line in (out / f"rank{rank}" / "log").read_text().splitlines():
            size, share = line.split()
            found[int(size)] += float(share) / RANKS
    return found


def test_sizes_are_added_up_as_the_plan_says(tmp_path):
    plan = Plan(allreduce_algorithms=((0, "recursive-doubling"), (LARGE, "ring")))
    exported = export_plan(plan, tmp_path / "plan", (Target.HOROVOD,), JobFacts(on_mpi=True))
    sent = bytes_sent(exported.env, tmp_path / "run")
    doubling, ring = (float(counts(algorithm, RANKS).wire) for algorithm in (Algorithm.RECURSIVE_DOUBLING, Algorithm.RING))
    assert doubling / ring == pytest.approx(4 / 3)
    assert sent == {SMALL: pytest.approx(doubling, rel=0.12), LARGE: pytest.approx(ring, rel=0.12)}


def test_another_plan_of_the_same_sizes_sends_other_bytes(tmp_path):
    plan = Plan(allreduce_algorithms=((0, "ring"), (LARGE, "recursive-doubling")))
    exported = export_plan(plan, tmp_path / "plan", (Target.HOROVOD,), JobFacts(on_mpi=True))
    sent = bytes_sent(exported.env, tmp_path / "run")
    assert sent[LARGE] > 1.2 * sent[SMALL]
