"""The option ``--machine`` of the verbs that predict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpro_search.machine import BUNDLED
from tests.in_process import dpro
from tests.sample import HOROVOD_SAMPLE

HOROVOD = ("--sample", HOROVOD_SAMPLE)


@pytest.fixture(scope="module")
def slow_cycles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled machine, but an all-reduce takes five times as much core time."""
    path = tmp_path_factory.mktemp("machine") / "machine.toml"
    path.write_text(BUNDLED.read_text().replace("collective_cpu_us = { value = 1200.0", "collective_cpu_us = { value = 6000.0"))
    return path


def test_a_replay_uses_the_constants_of_the_file(slow_cycles: Path) -> None:
    usual, slow = (json.loads(dpro("replay", *HOROVOD, *option, "--json").stdout) for option in ((), ("--machine", slow_cycles)))
    assert slow["predicted_iteration_us"] != usual["predicted_iteration_us"]


def test_a_search_and_its_workers_use_it_and_its_folder_names_it(slow_cycles: Path, tmp_path: Path) -> None:
    replayed = json.loads(dpro("replay", *HOROVOD, "--machine", slow_cycles, "--json").stdout)
    options = ("--trials", 8, "--workers", 2, "--quiet", "--json")
    facts = json.loads(dpro("run", *HOROVOD, "--machine", slow_cycles, *options, "--out", tmp_path / "run").stdout)
    assert facts["baseline_us"] == replayed["predicted_iteration_us"]
    assert "machine" in (tmp_path / "run" / "run.json").read_text()


@pytest.mark.parametrize("verb", ["replay", "diagnose", "run"])
def test_a_file_that_is_none_is_refused_in_one_line(verb: str, tmp_path: Path) -> None:
    done = dpro(verb, "--machine", tmp_path / "none.toml")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--machine:" in done.stderr
    assert "none.toml: cannot be read" in done.stderr
