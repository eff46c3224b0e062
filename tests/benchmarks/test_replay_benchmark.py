"""The benchmark speaks JSON with the keys that others rely on."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "replay.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_one_graph_gives_one_json_object():
    result = json.loads(run("--graph", "ring:2:30", "--json").stdout)
    keys = "ops edges makespan_us seconds ops_per_s retime_ops_per_s bytes_per_op baseline_seconds"
    assert set(keys.split()) <= set(result)
    assert result["ops"] == 2 * 30 * (4 + 2 * 2)


def test_what_is_no_graph_is_one_clear_line():
    result = run("--graph", "ring-2")
    assert result.returncode == 2
    assert result.stderr.strip() == "--graph ring-2: write KIND:WORKERS:LAYERS, like ring:8:3906"
