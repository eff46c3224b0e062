"""`Measured`: ops that were measured on one device, as the predictor is fitted to them and corrected by them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.correction import OpPoints
from dpro_search.costmodel.devices.features import base_us, features
from dpro_search.costmodel.devices.ops import Floats, Ops, Singles
from dpro_search.costmodel.devices.profile import DeviceProfile, Shares, probe_places, probes_of


@dataclass(frozen=True, kw_only=True)
class Measured:
    """n ops on a device.

    Attributes
    ----------
    name, family
        Of the device; devices of a family resemble each other, and are left out together.
    features : array [n, features]
    base_us : array [n]
    probes : array [at most 5]
        Places of the ops that the profile's probes are.
    """

    name: str
    family: str
    profile: DeviceProfile
    ops: Ops
    us: Floats
    features: Singles
    base_us: Floats
    probes: npt.NDArray[np.int64]

    @staticmethod
    def of(name: str, family: str, device: Device, ops: Ops, us: Floats, usual: Shares, *, probed: bool = True) -> Measured:
        """Of measured ops; those that `probe_places` chooses are the device's probes, unless it is to have none."""
        places = probe_places(ops, device)
        profile = DeviceProfile(device=device)
        if probed:
            profile = DeviceProfile(device=device, probes=probes_of(ops[places], us[places], device))
        return Measured(
            name=name,
            family=family,
            profile=profile,
            ops=ops,
            us=us,
            features=features(ops, profile, usual),
            base_us=base_us(ops, profile, usual),
            probes=places,
        )

    def __len__(self) -> int:
        return len(self.us)

    @property
    def ratio(self) -> Floats:
        """log(latency / base), [n]."""
        return np.asarray(np.log(self.us / self.base_us))

    @cached_property
    def points(self) -> OpPoints:
        """The ops as a correction sees them."""
        return OpPoints.of(self.ops, self.features)

    def __getitem__(self, chosen: npt.NDArray[np.bool_]) -> Measured:
        """Some of the ops; probes that are not among them are left to the profile."""
        places = np.cumsum(chosen) - 1
        return replace(
            self,
            ops=self.ops[chosen],
            us=self.us[chosen],
            features=self.features[chosen],
            base_us=self.base_us[chosen],
            probes=places[self.probes[chosen[self.probes]]],
        )
