"""Ranks that share cores: what they use them for, as measured, and how long they wait for it."""

from __future__ import annotations

import numpy as np
from scipy.optimize import least_squares

from dpro_search.collect.trace import Floats

# Of fits to measured points; constants are fitted as logarithms.
FEWEST = 4  # points
LEAST_US = 1e-6  # below, a constant counts as none
LOSS_SCALE = 0.1  # relative errors beyond this count less than their square
BOUNDS = np.log(1e-9), np.log(1e9)


def queued_us(alone_us: Floats, used_us: Floats, sharing: Floats) -> Floats:
    """What takes a rank so long alone, part of it on its core, where several ranks share the core.

    Mean values of a closed queue of ranks that request the core at random (Reiser & Lavenberg, "Mean-value analysis of closed
    multichain queueing networks", 1980): hardly more than alone while ranks wait for other things most of the time, and what they
    use the core for in all where that is longer.

    Parameters
    ----------
    alone_us, used_us, sharing
        Time alone, part of it on the core, and ranks on the core, at least 1, [points] each.
    """
    away_us = np.maximum(alone_us - used_us, 0.0)
    found, ahead = alone_us, np.zeros_like(alone_us)  # ranks that another one finds at the core
    for ranks in range(1, int(sharing.max(initial=1)) + 1):
        there_us = used_us * (1 + ahead)
        cycle_us = np.maximum(away_us + there_us, LEAST_US)
        ahead = ranks * there_us / cycle_us
        found = np.where(ranks <= sharing, cycle_us, found)
    return found


def fit_uses(uses: Floats, busy_us: Floats, duration_us: Floats) -> Floats:
    """What each use of a core takes, us, [uses], by robust least squares of the relative error; all 0 for too few points.

    Points count by how much of the time the core was used: an idle one spends time on waking up, a busy one does not.

    Parameters
    ----------
    uses
        How often the busiest core was used for each, [points, uses].
    busy_us, duration_us
        How long it was used, and what the whole took, [points] each; NaN where that was not measured.
    """
    known = busy_us > 0
    if known.sum() < FEWEST:
        return np.zeros(uses.shape[1])
    uses, logarithm, weight = uses[known], np.log(busy_us[known]), np.minimum(busy_us[known] / duration_us[known], 1.0)
    start = np.log((busy_us[known, None] / uses).min(axis=0) / uses.shape[1])  # together they explain no point wholly

    def residuals(constants: Floats) -> Floats:
        found: Floats = (np.log(uses @ np.exp(constants)) - logarithm) * weight
        return found

    found = least_squares(residuals, np.clip(start, *BOUNDS), loss="soft_l1", f_scale=LOSS_SCALE, bounds=BOUNDS)
    return np.asarray(np.exp(found.x), dtype=np.float64)
