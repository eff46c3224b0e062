"""Constants of a machine: the bundled file, files of other machines, and predictions and intervals that follow them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sample import sample

from dpro_search.collect.modules import LoweredOp, LoweredOps
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.costmodel.collectives.horovod import wire_us_per_byte
from dpro_search.costmodel.compressed_gradients import half_cast_us
from dpro_search.errors import InputError
from dpro_search.kinds import job_of
from dpro_search.kinds._measured import device_of
from dpro_search.machine import BUNDLED, VARIABLE, calibration, load_machine, machine_constants, machine_toml
from dpro_search.machine.constants import SECTIONS
from dpro_search.space.plan import Plan
from dpro_search.space.servers.store_job import goodput_bytes_per_us
from dpro_search.space.transformations.modules import change_of

FSDP = Path(__file__).parent.parent / "data" / "traces_v1" / "fsdp_mlp"


Changed = Callable[..., Path]


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Changed:
    """Makes predictions use the bundled file with lines replaced."""

    def use(*pairs: tuple[str, str]) -> Path:
        text = BUNDLED.read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / f"machine{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(text)
        monkeypatch.setenv(VARIABLE, str(path))
        return path

    return use


def test_each_bundled_value_has_a_machine_a_date_and_a_method() -> None:
    constants = load_machine(BUNDLED)
    names = {f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.__struct_fields__}
    assert set(constants.origins) == names
    assert all(origin.machine and origin.date and origin.how for origin in constants.origins.values())


def test_a_written_file_is_read_as_it_was(tmp_path: Path) -> None:
    constants = load_machine(BUNDLED)
    path = tmp_path / "machine.toml"
    path.write_text(machine_toml(constants))
    assert load_machine(path) == constants


def test_constants_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        machine_constants().horovod.dispatch_us = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version = 1", "version = 2", "machine file of version 2, this program reads 1"),
        ("version = 1", "version = ", "not TOML"),
        ('dispatch_us = { value = 300.0, source = "recordings" }', "", "horovod: 'dispatch_us' is missing"),
        ("value = 300.0", "value = -300.0", "no number from 0 to 1e15"),
        ("value = 300.0", "value = inf", "no number from 0 to 1e15"),
        ("value = 300.0", 'value = "300"', "no number from 0 to 1e15"),
        ('value = 300.0, source = "recordings"', "value = 300.0", "horovod.dispatch_us: 'source' is missing"),
        ('value = 300.0, source = "recordings"', 'value = 300.0, source = "hearsay"', "no source is called 'hearsay'"),
        ('value = 4000.0, source = "kernel"', 'value = 0.0, source = "kernel"', "quantum_us must be above 0"),
        ("[[5e8, 4200.0", "[[5e9, 4200.0", "rates of alpha_us_by_rate must ascend"),
        ("[0.02, 0.9]", "[0.9, 0.02]", "polling_bounds must be two ascending shares"),
        ("dispatch_us =", "dispatch_ms =", r":\d+: horovod.dispatch_ms: unknown key; did you mean 'dispatch_us'"),
        ("[gpu]", "[tpu]", r":\d+: tpu: unknown key; did you mean 'gpu'"),
        ('device = "cpu"', 'device = "abacus"', r":\d+: device: 'abacus' is not known; known are cpu, gpu"),
    ],
)
def test_a_damaged_or_later_file_is_refused_in_one_line(changed: Changed, old: str, new: str, said: str) -> None:
    path = changed((old, new))
    with pytest.raises(InputError, match=said) as caught:
        load_machine(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named_with_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.toml"))
    with pytest.raises(InputError, match=f"{VARIABLE}: .*none.toml: cannot be read"):
        machine_constants()


def test_a_cost_model_follows_a_changed_constant(changed: Changed) -> None:
    bucket_bytes = np.array([1e6])
    before_us = half_cast_us(bucket_bytes)
    changed(("value = 0.125e-3", "value = 0.25e-3"))
    assert half_cast_us(bucket_bytes) == 2 * before_us


def test_a_prediction_follows_a_changed_constant(changed: Changed) -> None:
    before = job_of(sample()).predict(Plan())
    changed(("collective_cpu_us = { value = 1200.0", "collective_cpu_us = { value = 6000.0"))
    assert job_of(sample()).predict(Plan()).iteration_us != before.iteration_us


def test_links_carry_the_goodput_of_the_machine(changed: Changed) -> None:
    before = wire_us_per_byte(1e9, 2), goodput_bytes_per_us(1e9)
    changed((f"tcp_goodput = {{ value = {1448 / 1514!r}", f"tcp_goodput = {{ value = {1448 / 1514 / 2!r}"))
    assert (wire_us_per_byte(1e9, 2), goodput_bytes_per_us(1e9)) == (2 * before[0], before[1] / 2)


def test_a_half_is_fresh_memory_from_the_threshold_of_the_machine_on(changed: Changed) -> None:
    bucket_bytes = np.array([2 * 2**20 - 2, 2 * 2**20])
    before_us = half_cast_us(bucket_bytes) / bucket_bytes
    changed(("mapped_bytes = { value = 33554432", "mapped_bytes = { value = 1048576"))
    after_us = half_cast_us(bucket_bytes) / bucket_bytes
    assert before_us[0] == before_us[1] == after_us[0]
    assert after_us[1] > after_us[0]


def test_how_uncertain_unmeasured_ops_are_follows_the_machine(changed: Changed) -> None:
    ops = (LoweredOp("aten::unheard_of", False, 1, 30.0),)
    lowered = LoweredOps(forward_us=100.0, backward_us=0.0, ops=ops, casts=0, cast_elements=0)
    assert change_of(lowered, _NothingMeasured()).uncertainties_us == {"aten::unheard_of": 15.0}
    changed(("unmeasured_ops = { value = 0.5", "unmeasured_ops = { value = 0.8"))
    assert change_of(lowered, _NothingMeasured()).uncertainties_us == {"aten::unheard_of": 24.0}


class _NothingMeasured:
    """Of no type of op is it known what bfloat16 does to it."""

    cast_share = 0.0

    def ratio(self, op_type: str, float32_us: float | None = None) -> None:
        return None

    def cast_us(self, elements: float) -> float:
        return 0.0


def test_an_interval_follows_a_changed_error_bar(changed: Changed) -> None:
    before = job_of(sample()).predict(Plan())
    changed(("horovod = { value = [0.05, 0.08]", "horovod = { value = [0.10, 0.16]"))
    after = job_of(sample()).predict(Plan())
    assert after.iteration_us == before.iteration_us
    assert _width(after.interval_us) > 1.5 * _width(before.interval_us)


def test_the_sample_is_calibrated_and_the_processors_are_named() -> None:
    opened_job = job_of(sample()).calibration
    assert opened_job is not None
    assert opened_job.calibrated
    assert opened_job.widening == 1
    assert "AMD EPYC" in opened_job.text
    assert "Horovod" in opened_job.text


def test_a_borrowed_error_bar_is_widened_and_says_so() -> None:
    constants = machine_constants()
    correction = calibration(constants, "fsdp")
    assert correction.model_error == tuple(constants.errors.widening * part for part in constants.errors.fsdp)
    assert correction.text == "not calibrated on this kind of job; model error widened 2 times"
    assert correction.on.startswith("that of DistributedDataParallel")


def test_a_fully_sharded_job_has_the_widened_interval(changed: Changed) -> None:
    wide = job_of(Trace.load(FSDP)).predict(Plan())
    changed(("widening = { value = 2.0", "widening = { value = 1.0"))
    narrow = job_of(Trace.load(FSDP)).predict(Plan())
    assert wide.iteration_us == narrow.iteration_us
    assert _width(wide.interval_us) > _width(narrow.interval_us)


def test_ranks_on_gpus_are_not_calibrated_by_jobs_on_cpu_hosts() -> None:
    constants = machine_constants()
    correction = calibration(constants, "ddp", "gpu")
    assert not correction.calibrated
    assert correction.widening == constants.errors.widening
    assert "not calibrated on this kind of machine" in correction.text
    assert "GPU" in correction.text


def test_kernels_of_a_recording_are_of_a_gpu_unless_they_are_mxnets_operators() -> None:
    trace = Trace.load(FSDP)
    kind = np.where(trace.events.kind == EventKind.OP, EventKind.KERNEL, trace.events.kind)
    kernels = replace(trace, events=replace(trace.events, kind=kind))
    in_mxnet = replace(kernels, meta=msgspec.structs.replace(trace.meta, framework="mxnet"))
    assert [device_of(one) for one in (trace, kernels, in_mxnet)] == ["cpu", "gpu", "cpu"]


def _width(interval_us: tuple[float, float]) -> float:
    return interval_us[1] - interval_us[0]
