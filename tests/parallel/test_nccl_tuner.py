"""NCCL's settings of a plan: the tuner plugin's file, read as the example plugin in NCCL's sources reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.costmodel.collectives.nccl import Placement, collective_us, ways_of
from dpro_search.errors import InputError
from dpro_search.parallel.export.nccl import tuned_groups, tuner_file
from tests.parallel.parallel_exports import exported

COLLECTIVES = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
ALGORITHMS = {"ring": "ring", "tree": "tree", "nvls": "switch", "nvls_tree": "switch and tree"}
PROTOCOLS = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}
LONGEST_LINE = 255  # of the plugin's buffer


def lines_of(text: str) -> list[list[str]]:
    """What the plugin makes of a file: comments and empty lines are passed over, lines of 8 to 10 fields count."""
    collected = []
    for line in text.splitlines():
        assert len(line) <= LONGEST_LINE
        if line and not line.startswith("#"):
            fields = [field.strip() for field in line.split(",")]
            assert 8 <= len(fields) <= 10, line
            collected.append(fields)
    return collected


def taken(lines: list[list[str]], collective: str, size: int, nodes: int, ranks: int) -> tuple[str, str] | None:
    """Algorithm and protocol of a call: of the first line that fits."""
    for name, low, high, algorithm, protocol, channels, of_nodes, of_ranks, operations, registered in lines:
        fits = name == collective and int(low) <= size <= int(high)
        if fits and int(of_nodes) in (-1, nodes) and int(of_ranks) in (-1, ranks):
            assert (channels, operations, registered) == ("-1", "-1", "-1")
            return ALGORITHMS[algorithm], PROTOCOLS[protocol]
    return None


@pytest.mark.parametrize(
    ("cluster", "placement"),
    [
        ("8xhgx-h100", Placement(ranks_per_node=8, nodes=8)),
        ("16xdgx-a100-80", Placement(ranks_per_node=8, nodes=16)),
        ("hgx-h100", Placement(ranks_per_node=8)),
        ("l40s-pcie-8", Placement(ranks_per_node=4)),
        ("2xp4de.24xlarge", Placement(ranks_per_node=8, nodes=2)),
    ],
)
def test_every_call_gets_the_way_that_is_predicted_fastest(cluster, placement):
    machine = parse_cluster(cluster)
    lines = lines_of(tuner_file(cluster, tuned_groups(machine, {"dp": placement})).decode())
    sizes = [1, 8, *(2**power + more for power in range(4, 36) for more in (-1, 0, 1))]
    for theirs, ours in COLLECTIVES.items():
        for size in sizes:
            way = taken(lines, theirs, size, placement.nodes, placement.ranks)
            best = float(collective_us(ours, size, machine, placement))
            by_way = [
                one.latency_us + one.us_per_byte * size
                for one in ways_of(ours, machine, placement)
                if (one.algorithm, one.protocol) == way
            ]
            assert min(by_way) == pytest.approx(best, rel=1e-6), (theirs, size, way)


def test_calls_of_other_groups_are_left_to_nccl():
    lines = lines_of(
        tuner_file("8xhgx-h100", tuned_groups(parse_cluster("8xhgx-h100"), {"tp": Placement(ranks_per_node=8)})).decode()
    )
    assert taken(lines, "allreduce", 1024, 1, 8) is not None
    assert taken(lines, "allreduce", 1024, 8, 64) is None
    assert taken(lines, "broadcast", 1024, 1, 8) is None


def test_a_plans_groups_of_ranks_have_lines_beside_the_frameworks_files(tmp_path):
    export = exported(tmp_path, "megatron", {"tp": 8, "zero_stage": 1}, more=("nccl",), cluster="2xhgx-h100")
    lines = lines_of((export.folder / "nccl_tuner.conf").read_text())
    assert {(fields[6], fields[7]) for fields in lines} == {("1", "8"), ("2", "2"), ("2", "16")}
    env = dict(line.split("=", 1) for line in (export.folder / "nccl.env").read_text().splitlines())
    assert env["NCCL_TUNER_PLUGIN"] == "example"
    assert Path(env["NCCL_TUNER_CONFIG_FILE"]) == (export.folder / "nccl_tuner.conf").resolve()
    plain = (export.folder / "nccl_algorithms.env").read_text()
    assert "NCCL_ALGO='allreduce:" in plain
    assert "megatron_arguments.json" in export.files


def test_alone_it_follows_no_plan(tmp_path):
    with pytest.raises(InputError, match=r"tp: nccl cannot express it; .*name the framework"):
        exported(tmp_path, "nccl", {"tp": 8}, cluster="2xhgx-h100")
