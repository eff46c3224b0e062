"""`slowest`: how much slower than the usual GPU the slowest of many equal ones computes, for which all others wait."""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

SPREAD = 0.015
"""Standard deviation of the time of compute-bound kernels over equal GPUs, relative to the mean. Of five clusters the box plots'
whiskers, 5.4 standard deviations apart, span 8 % on average, for chips differ in the clock that their power limit leaves them; what
waits for memory differs little (Sinha et al. 2022, "Not all GPUs are created equal", SC)."""


@lru_cache(maxsize=1024)
def expected_largest(count: int) -> float:
    """Expected largest of so many standard normal values (Blom 1958)."""
    return max(NormalDist().inv_cdf((count - 0.375) / (count + 0.25)), 0.0) if count > 1 else 0.0


def slowest(devices: int) -> float:
    """Its time over that of the usual one."""
    return 1.0 + SPREAD * expected_largest(devices)
