"""Which of the all-reduces of Open MPI's `coll/han` work: two shaped hosts of two ranks, in place, as Horovod's fused ones are.

    python -m experiments.validation.han_all_reduces [SETTING...]

Each setting runs by itself, with all-reduces of 64 KiB, 1 MiB and 16 MiB: whether sums are right, what crosses a host's link
for each byte, or how the job ended. Needs root and Open MPI.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from dpro_search.collect.launch.mpi import hierarchy_env, hierarchy_rules, run_mpi_job
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.errors import JobError

_RANKS, _PER_HOST = 4, 2
_SIZES = 1 << 16, 1 << 20, 1 << 24
_HAN = {"OMPI_MCA_coll_han_priority": "100"}
_NAMED = "rules that name tuned"
SETTINGS = {
    "in segments": _HAN,
    "in segments of 1 MiB": {**_HAN, "OMPI_MCA_coll_han_allreduce_segsize": str(1 << 20)},
    "in three steps": {**_HAN, "OMPI_MCA_coll_han_use_simple_allreduce": "1"},
    _NAMED: {},
    "rules of exports": {},
}
_PROGRAM = """
import ctypes, sys
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
handle = lambda name: ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))
sent = lambda: int(open("/sys/class/net/eth0/statistics/tx_bytes").read())
mpi.MPI_Init(None, None)
world, kind, add = map(handle, ("ompi_mpi_comm_world", "ompi_mpi_float", "ompi_mpi_op_sum"))
for size in map(int, sys.argv[1:]):
    buffer = (ctypes.c_float * (size // 4))(*([1.0] * (size // 4)))
    mpi.MPI_Barrier(world)
    before = sent()
    mpi.MPI_Allreduce(ctypes.c_void_p(1), buffer, size // 4, kind, add, world)
    mpi.MPI_Barrier(world)
    right = "right" if set(buffer) == {4.0} else "WRONG"
    print("%d bytes: sums %s, %.2f bytes a byte over the host's link" % (size, right, (sent() - before) / size), flush=True)
mpi.MPI_Finalize()
"""


def main() -> None:
    """Run the settings, and print what rank 0 saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"default: all of {', '.join(SETTINGS)}")
    for name in parser.parse_args().settings or SETTINGS:
        print(name)
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join(f"    {line}" for line in _lines(name, Path(folder))), flush=True)


def _lines(setting: str, folder: Path) -> list[str]:
    env = SETTINGS[setting]
    if not env:
        rules = hierarchy_rules([(0, False), (1 << 20, True)])
        path = folder / "rules"
        path.write_bytes(rules.replace(b"0 libnbc\n1048576 han", b"0 tuned\n1048576 han") if setting == _NAMED else rules)
        env = hierarchy_env(path)
    spec = JobSpec(
        command=(sys.executable, "-c", _PROGRAM, *map(str, _SIZES)),
        ranks=_RANKS,
        ranks_per_host=_PER_HOST,
        cores=default_cores(_RANKS, _PER_HOST),
        env=env,
        timeout_s=60,
    )
    ended = []
    with ShapedHosts(spec.hosts) as hosts:
        try:
            run_mpi_job(spec, folder / "run", hosts=hosts)
        except JobError as error:
            ended = [str(error).split(":")[0]]
    log = (folder / "run" / "rank0" / "log").read_text().splitlines()
    return [*(line for line in log if " bytes: " in line), *ended]


if __name__ == "__main__":
    main()
