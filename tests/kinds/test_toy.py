"""A kind that one file adds goes through every verb: nothing else of the package needs to know it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dpro_search
from dpro_search.collect.trace import Trace
from dpro_search.kinds import _names, kinds
from dpro_search.space.plan import Plan
from tests.kinds import toy
from tests.kinds.conformance import KindConformance
from tests.kinds.verbs import printed, verb


@pytest.fixture(autouse=True, scope="module")
def registered() -> Any:
    """The one line that a new kind adds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_names, "KINDS", ("tests.kinds.toy", *_names.KINDS))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    command = ["--framework", "toy", "--comm", "rounds", "--hosts", 1, "--out", path / "trace", "--", *toy.toy_script(path)]
    assert verb("collect", *command)["ranks"] == 1
    return path


class TestToy(KindConformance):
    kind = toy.KIND

    @classmethod
    def recording(cls) -> Trace:
        return toy.toy_trace((sys.executable, "toy.py"))


def test_it_is_a_kind_among_others() -> None:
    assert toy.KIND in kinds()


def test_replay(folder: Path) -> None:
    recorded = verb("replay", folder / "trace")
    assert recorded["error_pct"] == pytest.approx(0, abs=1e-6)
    fewer = verb("replay", folder / "trace", "--set", "rounds=1", "--what-if", "compute=0.5")
    assert fewer["predicted_iteration_us"] == pytest.approx(toy.COMPUTE_US / 2 + toy.ROUND_US)


def test_diagnose(folder: Path) -> None:
    assert verb("diagnose", folder / "trace")["findings"] == ["Rounds take most of a step."]
    assert "rounds=1" in printed("diagnose", folder / "trace")


def test_run_export_validate_and_report(folder: Path) -> None:
    result = verb("run", folder / "trace", "--trials", 8, "--sampler", "mcmc", "--out", folder / "run")
    assert result["plans"][0]["plan"] == {"rounds": 1}
    verb("export", folder / "run", "--out", folder / "tuned")
    assert (folder / "tuned" / "toy.env").read_text() == "TOY_ROUNDS=1\n"
    measured = verb("validate", folder / "run", "--top", 1, "--rounds", 2, "--warmup", 1, "--run-recorded-command")
    assert measured["plans"][0]["plan"] == {"rounds": 1}
    assert measured["plans"][0]["predicted_us"] == pytest.approx(toy.COMPUTE_US + toy.ROUND_US)
    assert measured["plans"][0]["measured_us"] > toy.COMPUTE_US
    verb("report", folder / "run", "--out", folder / "run.html")
    assert "1 round" in (folder / "run.html").read_text()


def test_its_settings_are_found_where_nothing_has_imported_it(folder: Path) -> None:
    """A process that begins with a file of a plan knows only the line in `kinds._names`."""
    verb("run", folder / "trace", "--trials", 4, "--sampler", "mcmc", "--out", folder / "again")
    (folder / "by-name.json").write_text('{"version": 2, "rounds": 1}')
    plans = (folder / "again" / "plans" / "plan-1.json", folder / "by-name.json")
    assert json.loads(plans[0].read_bytes()) == {"version": 2, "scheme": {"name": "toy", "rounds": 1}}
    replayed, exported, reported, again = alone(
        ("replay", folder / "trace", "--plan", plans[1]),
        ("export", plans[0], "--out", folder / "alone"),
        ("report", folder / "again", "--out", folder / "again.html"),
        ("run", folder / "trace", "--trials", 6, "--sampler", "mcmc", "--out", folder / "again"),
    )
    assert replayed["predicted_iteration_us"] == pytest.approx(toy.COMPUTE_US + toy.ROUND_US)
    assert exported["files"]
    assert reported
    assert (folder / "again.html").exists()
    assert again["trials"] == 6


_ALONE = """
import json, os, sys
from dpro_search.kinds import _names
_names.KINDS = ("tests.kinds.toy", *_names.KINDS)
import dpro_search.report, dpro_search.search.samplers
from dpro_search.cli import main
for words in json.loads(sys.argv[1]):
    assert "tests.kinds.toy" not in sys.modules
    if os.fork() == 0:
        sys.exit(main(words))
    if os.wait()[1]:
        sys.exit(1)
"""


def alone(*commands: tuple[object, ...]) -> list[dict[str, Any]]:
    """The output of verbs, each in a process of its own, which are copies of one that has loaded the package and no added kind."""
    words = json.dumps([[str(word) for word in (verb, "--json", *rest)] for verb, *rest in commands])
    done = subprocess.run([sys.executable, "-c", _ALONE, words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_doctor(folder: Path) -> None:
    checks = {check["name"]: check for check in verb("doctor", folder / "trace")["checks"]}
    assert checks["run"]["detail"] == "plans may change rounds"
    assert checks["export"]["detail"] == "for toy"
    assert checks["validate"]["ok"]


def test_the_python_api(folder: Path) -> None:
    job = dpro_search.load(folder / "trace")
    assert job.replay(Plan.of(rounds=1)).iteration_us < job.replay().iteration_us
    assert job.diagnose().gains[0]["what_if"] == "rounds=1"
