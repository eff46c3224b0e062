"""The campaign of parallel jobs (`experiments/parallel`): cases of a small model are timed, run once, and scored."""

import os
import shutil

import pytest

from experiments.parallel.cases import CONFIGS, cases
from experiments.parallel.measure import measure, rows_of
from experiments.parallel.score import score

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="shaped hosts need root, ip and tc"),
]


def test_cases_are_timed_run_and_scored_and_not_run_again(tmp_path, torch_python, monkeypatch):
    monkeypatch.setitem(CONFIGS, "gpt", CONFIGS["gpt"] | {"n_embd": 64, "n_layer": 4, "vocab_size": 128})
    chosen = [case for case in cases(paced=False) if case.job == "real-gpt-2-2gbit" and case.strategy in ("ddp", "tp")]
    said: list[str] = []
    measure(tmp_path, chosen, torch_python, 1, said.append)
    scored = score(tmp_path, chosen)
    assert [row["strategy"] for row in scored["rows"]] == ["ddp", "tp"]
    assert all(row["measured_us"] > 0 and row["predicted_us"] > 0 for row in scored["rows"])
    assert scored["failed"] == []
    assert scored["losses"]["compared"] > 5
    assert scored["losses"]["worst_relative"] < 1e-3
    before, (*_, last) = rows_of(tmp_path), said
    assert "(2 of 2, 0 min left)" in last
    measure(tmp_path, chosen, torch_python, 1, said.append)
    assert rows_of(tmp_path) == before
