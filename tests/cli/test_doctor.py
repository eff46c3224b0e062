"""`doctor` looks at the machine as it is."""

import json
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpro_search.collect.trace import ClockReport, CommSettings, Events, Steps, Trace, TraceMeta
from tests.in_process import dpro
from tests.recordings import trace_of


def doctor(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return dpro("doctor", *args, **env)


def checks_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The smallest trace: one rank, no events."""
    ints, floats = np.zeros(0, dtype=np.int64), np.zeros(0)
    columns = dict.fromkeys(("name", "kind", "rank", "stream", "step", "tensor", "collective", "size_bytes"), ints)
    steps = dict.fromkeys(("start_us", "end_us", "compute_cpu_us", "comm_cpu_us"), floats)
    Trace(
        meta=TraceMeta(
            framework="tensorflow",
            comm="horovod",
            ranks=1,
            hosts=("h0",),
            cores=(-1,),
            settings=CommSettings(fusion_threshold_bytes=0, cycle_time_us=1000.0),
            clock=ClockReport(offset_us=(0.0,), residual_us=(0.0,), method="one rank"),
        ),
        names=(),
        events=Events(**columns, start_us=floats, end_us=floats),
        steps=Steps(**steps, rank=ints, index=ints, traced=np.zeros(0, dtype=np.bool_)),
        tensors=(),
        graphs=(),
        graph_of_rank=(),
    ).save(tmp_path / "trace")
    return tmp_path / "trace"


def test_each_check_says_what_was_found_and_how_to_mend_it(trace: Path) -> None:
    for check in checks_of(doctor(trace, "--json")).values():
        assert set(check) == {"name", "ok", "detail", "fix"}
        assert check["detail"]
        assert bool(check["fix"]) != check["ok"]


def test_it_reports_the_running_python(trace: Path) -> None:
    assert platform.python_version() in str(checks_of(doctor(trace, "--json"))["Python"]["detail"])


def test_xgboost_is_found_under_either_of_its_names(trace: Path) -> None:
    check = checks_of(doctor(trace, "--json"))["packages"]
    assert check["ok"]
    assert re.search(r"xgboost(-cpu)? \d", str(check["detail"]))


@pytest.mark.parametrize("framework", ["tensorflow", "torch", "mxnet"])
def test_a_missing_framework_is_no_failure_and_names_the_script(trace: Path, framework: str) -> None:
    done = doctor(trace, "--json")
    assert done.returncode == 0
    assert f"scripts/make_env.sh {framework}" in str(checks_of(done)[framework]["fix"])


def test_without_mpirun_it_says_what_to_install(trace: Path, tmp_path: Path) -> None:
    check = checks_of(doctor(trace, "--json", PATH=str(tmp_path)))["MPI"]
    assert not check["ok"]
    assert "openmpi-bin" in str(check["fix"])


def test_an_environment_that_cannot_import_its_framework_is_reported(trace: Path, tmp_path: Path) -> None:
    interpreter = tmp_path / "envs" / "tensorflow" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # a real Python without any packages
    interpreter.chmod(0o755)
    check = checks_of(doctor(trace, "--json", DPRO_SEARCH_ENVS=str(tmp_path / "envs")))["tensorflow"]
    assert not check["ok"]
    assert "No module named 'tensorflow'" in str(check["detail"])


def test_a_trace_that_can_be_read_is_described(trace: Path) -> None:
    assert "tensorflow + horovod, 1 ranks, 0 events" in str(checks_of(doctor(trace, "--json"))["trace"]["detail"])


def test_of_the_sample_it_says_what_each_verb_can_do() -> None:
    checks = checks_of(doctor("--json"))
    assert checks["replay, diagnose"]["ok"]
    assert "error" in str(checks["replay, diagnose"]["detail"])
    assert "bucket_cap_bytes" in str(checks["run"]["detail"])
    assert "ddp" in str(checks["export"]["detail"])
    assert "validate" in checks


def test_a_job_without_knobs_cannot_be_searched_and_it_says_what_can_be_asked(tmp_path: Path) -> None:
    trace = trace_of("fsdp_mlp")
    replace(trace, meta=msgspec.structs.replace(trace.meta, format="chakra")).save(tmp_path / "trace")
    checks = checks_of(doctor(tmp_path / "trace", "--json"))
    assert checks["replay, diagnose"]["ok"]
    assert not checks["run"]["ok"]
    assert "what-if" in str(checks["run"]["fix"])
    assert not checks["validate"]["ok"]


def test_a_trace_that_cannot_be_read_fails(trace: Path) -> None:
    data = trace / "trace.npz"
    data.write_bytes(data.read_bytes()[:100])
    done = doctor(trace, "--json")
    assert done.returncode == 1
    assert str(data) in str(checks_of(done)["trace"]["detail"])


def test_the_table_fits_80_columns(trace: Path) -> None:
    lines = doctor(trace).stdout.splitlines()
    assert "This machine" in lines[0]
    assert max(map(len, lines)) <= 80
