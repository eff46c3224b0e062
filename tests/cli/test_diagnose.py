"""The verb `diagnose` on the bundled sample of Horovod."""

import functools
import json
import subprocess

import pytest
from sample import HOROVOD_SAMPLE

from tests.in_process import dpro


@functools.cache
def diagnose(*args: str) -> subprocess.CompletedProcess[str]:
    return dpro("diagnose", "--sample", HOROVOD_SAMPLE, *args)


def test_json_has_the_path_the_ranks_and_the_gains():
    result = json.loads(diagnose("--json").stdout)
    assert {"critical_path", "ranks", "gains"} <= set(result)
    assert [row["rank"] for row in result["ranks"]] == [0, 1]
    assert [row["gain_us"] for row in result["gains"]] == sorted((row["gain_us"] for row in result["gains"]), reverse=True)


def test_json_has_the_ops_of_the_path_the_slack_and_the_memory():
    result = json.loads(diagnose("--json").stdout)
    shares = [row["share_pct"] for row in result["critical_ops"]]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100
    assert {row["reason"] for row in result["critical_ops"]} <= {"start", "dependency", "device", "collective"}
    assert all(row["op"].endswith(f"@{row['rank']}") for row in result["critical_ops"])
    assert result["op_level_iteration_us"] == pytest.approx(result["iteration_us"], rel=0.05)
    assert 0 <= result["slack"]["p10_us"] <= result["slack"]["p50_us"] <= result["slack"]["p90_us"]
    assert [row["rank"] for row in result["memory"]] == [0, 1]
    for row in result["memory"]:
        sizes = [buffer["bytes"] for buffer in row["buffers"]]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(sizes) <= row["peak_bytes"]


def test_the_text_fits_80_columns():
    done = diagnose()
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "bandwidth=2" in done.stdout
    assert "ops on the critical path" in done.stdout
    assert "variables, gradients, buffer" in done.stdout
