"""All-reduce algorithms of the MPI library itself, by name: "native ring" is its ring, "native" what it chooses itself.

Both libraries are told by control variables (MPI_T), for which mpi4py has nothing. Standard library only.
"""

import ctypes
import functools
import os
import subprocess
import sys

# Numbers of Open MPI's coll_tuned_allreduce_algorithm.
OPEN_MPI = {
    "default": 0,
    "nonoverlapping": 2,
    "recursive-doubling": 3,
    "ring": 4,
    "segmented-ring": 5,
    "rabenseifner": 6,
}
# Values of MPICH's two variables. A ring and a tree are among its non-blocking algorithms only.
MPICH = {
    "default": ("auto", "auto"),
    "recursive-doubling": ("recursive_doubling", "auto"),
    "rabenseifner": ("reduce_scatter_allgather", "auto"),
    "ring": ("nb", "tsp_ring"),
    "tree": ("nb", "tsp_tree"),
}
OPEN_MPI_FILES = "libmpi.so.40", "libmpi.so"
MPICH_FILES = "libmpi.so.12", "libmpich.so.12"
OPEN_MPI_OBEYS = "OMPI_MCA_coll_tuned_use_dynamic_rules"  # must be 1 in the environment before MPI is initialised
OPEN_MPI_VARIABLE = "coll_tuned_allreduce_algorithm"
_MPICH_VARIABLES = "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM", "MPIR_CVAR_IALLREDUCE_INTRA_ALGORITHM"


class OpenMpiAlgorithms:
    """All-reduces of Open MPI by algorithm, over a communicator of mpi4py.

    The variable is read when a communicator is made, so that each algorithm has one: all ranks ask for the same, in the same order.
    """

    names = tuple(OPEN_MPI)

    def __init__(self, communicator):
        self._comm, self._made = communicator, []

    def refusal(self):
        """Why an algorithm cannot be chosen; None: it can."""
        if control_variable(OPEN_MPI_FILES, OPEN_MPI_OBEYS[len("OMPI_MCA_") :]).get():
            return None
        return "Open MPI was initialised without %s=1: import dpro_search_all_reduce before mpi4py, or set it" % OPEN_MPI_OBEYS

    def all_reduce(self, name):
        """`Allreduce` of mpi4py by this algorithm."""
        if name == "default":
            return self._comm.Allreduce
        variable = control_variable(OPEN_MPI_FILES, OPEN_MPI_VARIABLE)
        variable.set(OPEN_MPI[name])
        self._made.append(self._comm.Dup())
        variable.set(OPEN_MPI["default"])
        return self._made[-1].Allreduce

    def close(self):
        """Free the communicators; all ranks together."""
        for made in self._made:
            made.Free()


class MpichAlgorithms:
    """The same of MPICH, whose variables are read at each call."""

    names = tuple(MPICH)

    def __init__(self, communicator):
        self._comm = communicator

    def refusal(self):
        return None

    def all_reduce(self, name):
        settings = [
            (control_variable(MPICH_FILES, one), _mpich_number(one, value)) for one, value in zip(_MPICH_VARIABLES, MPICH[name])
        ]

        def run(*arguments):
            for variable, number in settings:
                variable.set(number)
            self._comm.Allreduce(*arguments)

        return run

    def close(self):
        pass


class ControlVariable:
    """A whole number that the MPI library of this process is controlled by."""

    def __init__(self, files, name):
        self._library, index, count = mpi_library(files), ctypes.c_int(), ctypes.c_int()
        self._name, self._handle, self._known = name, ctypes.c_void_p(), None
        self._library.MPI_T_init_thread(0, ctypes.byref(ctypes.c_int()))
        if self._library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)):
            raise RuntimeError("this MPI library has no variable %s" % name)
        self._library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(self._handle), ctypes.byref(count))

    def get(self):
        value = ctypes.c_int()
        self._library.MPI_T_cvar_read(self._handle, ctypes.byref(value))
        return value.value

    def set(self, number):
        if number != self._known:
            if self._library.MPI_T_cvar_write(self._handle, ctypes.byref(ctypes.c_int(number))):
                raise RuntimeError("the MPI library does not let %s be changed" % self._name)
            self._known = number


@functools.lru_cache(maxsize=None)
def control_variable(files, name):
    """The one object of a variable of a library, which knows what it was last set to."""
    return ControlVariable(files, name)


@functools.lru_cache(maxsize=None)
def mpi_library(files):
    """An MPI library by the names that its file has."""
    for name in files:
        try:
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            failed = error
    raise failed


@functools.lru_cache(maxsize=None)
def _mpich_number(name, value):
    """The number of a value, which differs between versions: a process with the variable in its environment prints it."""
    if value == "auto":
        return 0
    plain_env = {key: text for key, text in os.environ.items() if not key.startswith(("PMI", "HYD", "MPIR_CVAR"))}
    path = os.pathsep.join((os.path.dirname(os.path.dirname(os.path.abspath(__file__))), plain_env.get("PYTHONPATH", "")))
    read = "import sys, dpro_search_all_reduce.library as m; print(m.ControlVariable(m.MPICH_FILES, sys.argv[1]).get())"
    env = dict(plain_env, PYTHONPATH=path, **{name: value})
    number = int(subprocess.check_output([sys.executable, "-c", read, name], env=env))
    if not number:
        raise RuntimeError("MPICH's %s knows no %s" % (name, value))
    return number
