"""Logs of NCCL itself in their documented formats: the inspector's times name a slow rank, reports of RAS tell where ranks part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpro_search.analysis.ranks import ranks
from dpro_search.errors import TraceFormatError

_RANKS, _STEPS, _BUCKETS = 4, 60, 3
_EPOCH_US = 1_752_867_229_000_000


def inspector_logs(folder: Path, *, slow_rank: int | None = None, verbose: bool = True, marked: bool = False) -> None:
    """Logs of a data-parallel job; `marked`: a line of its own has the header, as from version 6.0 on."""
    draws = np.random.default_rng(0)
    compute_us = draws.normal(20_000, 200, (_STEPS, _RANKS))
    if slow_rank is not None:
        compute_us[_STEPS // 2 :, slow_rank] *= 1.4
    lines: list[list[dict[str, Any]]] = [[] for _ in range(_RANKS)]
    ready_us = np.zeros(_RANKS)
    for step in range(_STEPS):
        for bucket in range(_BUCKETS):
            arrived_us = ready_us + compute_us[step] / _BUCKETS
            ended_us = arrived_us.max() + 1_500
            for rank in range(_RANKS):
                times = {"coll_start_ts": _EPOCH_US + int(arrived_us[rank]) - 40, "coll_stop_ts": _EPOCH_US + int(arrived_us[rank])}
                kernels = {
                    "channel_id": 0,
                    "kernel_start_ts": _EPOCH_US + int(arrived_us[rank]),
                    "kernel_stop_ts": _EPOCH_US + int(ended_us),
                }
                call: dict[str, Any] = {
                    "coll": "AllReduce",
                    "coll_sn": step * _BUCKETS + bucket,
                    "coll_msg_size_bytes": 1 << (20 + bucket),
                    "coll_exec_time_us": int(ended_us - arrived_us[rank]),
                }
                if verbose:
                    call["event_trace_ts"] = {**times, "kernel_events": [kernels]}
                lines[rank].append(call)
            ready_us = np.full(_RANKS, ended_us)
    for rank in range(_RANKS):
        context = {
            "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": _RANKS, "nnodes": 2},
            "metadata": {
                "inspector_output_format_version": "v6.0" if marked else "v4.0",
                "hostname": f"node{rank // 2}",
                "pid": 100 + rank,
            },
        }
        rows = [{**({} if marked else context), "coll_perf": call} for call in lines[rank]]
        rows = [{**context, "dump_stats": {}}, *rows] if marked else rows
        (folder / f"node{rank // 2}-pid{100 + rank}.log").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("marked", [False, True])
def test_a_slow_rank_is_named_from_the_inspectors_times(tmp_path: Path, marked: bool) -> None:
    inspector_logs(tmp_path, slow_rank=2, marked=marked)
    answer = ranks(tmp_path)
    (finding,) = answer.findings
    assert (finding.kind, finding.ranks, finding.host) == ("compute", (2,), "node1")
    assert finding.by_us == pytest.approx(8_000, rel=0.15)
    assert answer.steps >= _STEPS - 2


def test_ranks_that_are_alike_are_not_named(tmp_path: Path) -> None:
    inspector_logs(tmp_path)
    assert ranks(tmp_path).findings == ()


def test_logs_without_times_say_how_to_get_them(tmp_path: Path) -> None:
    inspector_logs(tmp_path, verbose=False)
    with pytest.raises(TraceFormatError, match=r"line 1: .*NCCL_INSPECTOR_DUMP_VERBOSE=1"):
        ranks(tmp_path)


def test_a_line_that_was_being_written_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    inspector_logs(tmp_path, slow_rank=1)
    path = tmp_path / "node0-pid100.log"
    text = path.read_text()
    path.write_text(text[:-40])
    assert ranks(tmp_path).findings[0].ranks == (1,)
    path.write_text("{" + text)
    with pytest.raises(TraceFormatError, match="line 1: not of NCCL's inspector"):
        ranks(tmp_path)


def test_collectives_that_do_not_repeat_have_no_steps(tmp_path: Path) -> None:
    inspector_logs(tmp_path)
    for path in tmp_path.iterdir():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(TraceFormatError, match="do not repeat 8 times"):
        ranks(tmp_path)


def ras_report(counts: list[int], *, timestamp: str = "2026-06-19 06:51:56", missing: int | None = None) -> str:
    """A report as ``ncclras -f json -v`` prints it."""
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    rank_rows = [
        {
            "rank": rank,
            "host": "10.0.77.184",
            "pid": 8813 + rank,
            "cuda_dev": rank,
            "nvml_dev": rank,
            "status": status,
            "collective_counts": {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": count},
        }
        for rank, count in enumerate(counts)
        if rank != missing
    ]
    missing_rows = (
        [] if missing is None else [{"rank": missing, "host": "10.0.77.184", "pid": 9, "cuda_dev": 1, "nvml_dev": 1, "status": {}}]
    )
    communicator = {"hash": "0x514e98cf4e44862b", "size": len(counts), "ranks": rank_rows, "missing_ranks": missing_rows}
    return json.dumps({"nccl_version": "2.28.9", "timestamp": timestamp, "communicators": [communicator]}, indent=2)


def test_a_rank_that_is_behind_in_a_report_of_ras_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ras.json"
    path.write_text(ras_report([10, 3, 10]))
    answer = ranks(path)
    assert answer.parting is not None
    assert (answer.parting.behind, answer.parting.sequence) == ((1,), 4)
    assert answer.parting.last[0] == ("AllReduce", 10)
    assert "take a second report" in answer.notes[0]


def test_a_rank_that_moves_from_one_report_to_the_next_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(ras_report([10, 9, 10], timestamp="2026-06-19 06:51:56"))
    (tmp_path / "b.json").write_text(ras_report([12, 11, 12], timestamp="2026-06-19 06:52:06"))
    answer = ranks(tmp_path)
    assert answer.parting is None
    assert answer.lines() == list(answer.notes)


def test_a_rank_that_did_not_answer_is_named_also_where_nccl_forgot_a_comma(tmp_path: Path) -> None:
    path = tmp_path / "ras.json"
    path.write_text(
        ras_report([4, 4], missing=1).replace('"nvml_dev": 1,\n          "status": {}', '"nvml_dev": 1\n          "status": {}')
    )
    parting = ranks(path).parting
    assert parting is not None
    assert parting.behind == (1,)


def test_a_report_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ras.json"
    path.write_text('{"communicators": 3}')
    with pytest.raises(TraceFormatError, match="no report of ncclras"):
        ranks(path)
