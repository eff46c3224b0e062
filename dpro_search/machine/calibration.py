"""`Calibration`: what an error bar was calibrated on, and by how much it is widened where that is not the job at hand."""

from __future__ import annotations

import msgspec

from dpro_search.machine.constants import Device, MachineConstants

_JOBS = {
    "horovod": "Horovod jobs on Gloo",
    "horovod_mpi": "Horovod jobs on Open MPI",
    "ddp": "PyTorch DistributedDataParallel jobs",
    "fsdp": "fully sharded PyTorch jobs",
    "kvstore": "MXNet jobs with parameter servers",
    "byteps": "MXNet jobs with BytePS",
    "data_parallel": "synthetic data-parallel jobs",
}
_HOSTS = {"cpu": "CPU hosts", "gpu": "GPU hosts"}


class IntervalSource(msgspec.Struct, frozen=True, kw_only=True):
    """The basis of an interval: whether and on what errors were measured, the factor of widening, and all that in one line."""

    calibrated: bool
    on: str
    widening: float
    text: str


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Calibration of the error bar of one kind of job."""

    calibrated: bool  # Whether the error bar was measured on such jobs, on such devices.
    # Half the width of an interval without sampling error, relative to the prediction: (recorded setting, changed setting); already
    # widened where it was not calibrated.
    model_error: tuple[float, float]
    widening: float  # Factor by which it was widened; 1 where it was calibrated.
    on: str  # What it was measured on.
    why_not: str = ""  # What it was not measured on, of the job at hand; empty where it was.
    rests_on: str = ""  # What the interval of this job rests on, where that is the job's own recording.

    @property
    def text(self) -> str:
        """In one line."""
        if self.rests_on:
            return self.rests_on
        if self.calibrated:
            return f"errors of {self.on}"
        return f"not calibrated on {self.why_not}; model error widened {self.widening:g} times"

    @property
    def source(self) -> IntervalSource:
        """The part of it that answers show."""
        return IntervalSource(calibrated=self.calibrated, on=self.on, widening=self.widening, text=self.text)


def calibration(constants: MachineConstants, kind: str, device: Device = "cpu", *, unlike: str = "") -> Calibration:
    """The error bar of a kind of job, by its name in `ErrorBars`, for ranks that compute on a device.

    The processor's model does not decide: error bars are relative to predictions from the job's own recording. `unlike` names what
    else of the job the errors were not measured on; empty: nothing.
    """
    origin = constants.origins[f"errors.{kind}"]
    low, high = getattr(constants.errors, kind)
    where = f"{_HOSTS[constants.device]} ({', '.join(constants.processors)}), {origin.how}"
    reasons = []
    if origin.status not in ("measured", "fitted"):
        reasons.append("this kind of job")
    if device != constants.device:
        reasons.append(f"this kind of machine ({_HOSTS[device]})")
    if unlike:
        reasons.append(unlike)
    factor = constants.errors.widening if reasons else 1.0
    return Calibration(
        calibrated=not reasons,
        model_error=(low * factor, high * factor),
        widening=factor,
        on=f"{_JOBS[kind]} on {where}" if origin.status in ("measured", "fitted") else origin.how,
        why_not=" and ".join(reasons),
    )
