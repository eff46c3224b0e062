"""Constants of this machine are measured into a file of the bundled file's schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro_search.errors import InputError
from dpro_search.machine import BUNDLED, Origin, load_machine, machine_toml
from dpro_search.measure import machine as measured_machine
from dpro_search.measure.machine import PROBES, Probe, measure_machine, value_of, with_value


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("machine") / "machine.toml"
    measure_machine(out, rounds=1)
    return out


def test_probes_are_measured_here(measured: Path) -> None:
    machine_file = load_machine(measured)
    assert {name for name, origin in machine_file.origins.items() if "--collect machine" in origin.how} == {
        f"probes.{name}" for name in PROBES
    }
    assert all(machine_file.origins[f"probes.{name}"].machine == machine_file.name for name in PROBES)


def test_probes_are_of_the_right_size(measured: Path) -> None:
    probes = load_machine(measured).probes
    assert 1e-6 < probes.copy_us_per_byte < 1e-2
    assert 1e-5 < probes.tcp_us_per_byte < 1e-1
    assert 1 < probes.round_trip_us < 1e4
    assert 100 < probes.time_slice_us < 1e5


def test_constants_are_scaled_by_the_ratio_of_their_probe(measured: Path) -> None:
    machine_file, bundled = load_machine(measured), load_machine(BUNDLED)
    for name, probe in PROBES.items():
        ratio = getattr(machine_file.probes, name) / getattr(bundled.probes, name)
        for scaled in probe.scaled:
            assert value_of(machine_file, scaled) == pytest.approx(ratio * value_of(bundled, scaled))
            assert machine_file.origins[scaled].status == "scaled"


def test_other_constants_are_bundled_ones_and_say_so(measured: Path) -> None:
    machine_file, bundled = load_machine(measured), load_machine(BUNDLED)
    assert machine_file.torch == bundled.torch
    assert machine_file.origins["torch.alpha_us"].status == "bundled"
    assert machine_file.origins["torch.alpha_us"].how.startswith("bundled, not measured here")
    assert machine_file.origins["errors.ddp"] == bundled.origins["errors.ddp"]


def test_an_interrupted_measurement_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    first, second = "round_trip_us", "time_slice_us"
    probes = {first: PROBES[first], second: Probe(interrupted, "never", ())}
    monkeypatch.setattr(measured_machine, "PROBES", probes)
    out, steps = tmp_path / "machine.toml", list[str]()
    with pytest.raises(KeyboardInterrupt):
        measure_machine(out, rounds=1)
    kept = load_machine(out)
    probes[second] = PROBES[second]
    whole = measure_machine(out, rounds=1, on_progress=steps.append)
    assert steps == [f"{second}, round 1 of 1"]
    assert whole.origins[f"probes.{first}"] == kept.origins[f"probes.{first}"]
    assert whole.origins[f"probes.{second}"].status == "measured"


def test_the_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "machine.toml"
    origin = Origin(machine="an abacus", date="2026-11-24", how="by hand", status="measured")
    out.write_text(machine_toml(with_value(load_machine(BUNDLED), "horovod.dispatch_us", 1.0, origin)))
    with pytest.raises(InputError, match="of another machine"):
        measure_machine(out)
