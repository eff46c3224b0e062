"""The verb `diagnose` on the bundled sample, as a process."""

import json
import subprocess
import sys


def diagnose(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dpro_search.cli", "diagnose", *args], capture_output=True, text=True)


def test_json_has_the_path_the_ranks_and_the_gains():
    result = json.loads(diagnose("--json").stdout)
    assert {"critical_path", "ranks", "gains"} <= set(result)
    assert [row["rank"] for row in result["ranks"]] == [0, 1]
    assert [row["gain_us"] for row in result["gains"]] == sorted((row["gain_us"] for row in result["gains"]), reverse=True)


def test_the_text_fits_80_columns():
    done = diagnose()
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "bandwidth=2" in done.stdout
