"""Constants of a machine that cost models use, as data with provenance; the bundled file is of the testbed."""

from __future__ import annotations

from dpro_search.machine.calibration import Calibration, IntervalSource, calibration
from dpro_search.machine.constants import MACHINE_VERSION, Device, MachineConstants, Origin
from dpro_search.machine.files import BUNDLED, VARIABLE, load_machine, machine_constants, machine_toml

__all__ = [
    "BUNDLED",
    "MACHINE_VERSION",
    "VARIABLE",
    "Calibration",
    "Device",
    "IntervalSource",
    "MachineConstants",
    "Origin",
    "calibration",
    "load_machine",
    "machine_constants",
    "machine_toml",
]
