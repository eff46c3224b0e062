"""Dumps of PyTorch's flight recorder in the documented JSON format: they tell where ranks part."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from dpro_search.analysis.ranks import ranks
from dpro_search.errors import InputError, TraceFormatError


def dump(collectives: int, name: str = "nccl:all_reduce") -> dict[str, object]:
    entries = [
        {
            "record_id": number,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number + 1,
            "profiling_name": name,
            "time_created_ns": 1_724_779_239_936_775_119 + number * 1_000_000,
            "input_sizes": [[3, 4]],
            "input_dtypes": ["Float"],
            "state": "completed",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": 1_724_779_239_937_000_000 + number * 1_000_000,
            "retired": True,
            "timeout_ms": 600_000,
            "is_p2p": False,
        }
        for number in range(collectives)
    ]
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    return {"version": "2.4", "pg_config": groups, "pg_status": {}, "entries": entries}


def test_a_rank_that_stopped_is_named(tmp_path: Path) -> None:
    for rank, collectives in enumerate((7, 5, 7)):
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(dump(collectives)))
    parting = ranks(tmp_path).parting
    assert parting is not None
    assert (parting.behind, parting.sequence) == ((1,), 6)
    assert parting.last == {0: ("all_reduce", 7), 1: ("all_reduce", 5), 2: ("all_reduce", 7)}


def test_ranks_that_went_together_do_not_part(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(dump(7)))
    assert ranks(tmp_path).parting is None


def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump(3)))
    with pytest.raises(InputError, match=r"pickle, which is not opened.*json\.dump"):
        ranks(tmp_path)


def test_other_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics_0.json").write_text('{"loss": 1}')
    with pytest.raises(TraceFormatError, match="flight recorder"):
        ranks(tmp_path)
