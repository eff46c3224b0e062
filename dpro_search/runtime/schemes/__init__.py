"""Synchronisation schemes as values, and state machines that decide when workers exchange updates, in jobs and in simulations.

    scheme = parse_scheme("ssp(staleness=3)")            # a Scheme; its text is what plans, files and scripts hold
    coordinator = Coordinator(scheme, workers=4)
    coordinator.join(0, now=0.0)
    order = coordinator.order(0, now=0.0)                # how long worker 0 trains before it commits

The modules import the standard library and the package's errors alone, for they also run in a user's job
(`dpro_search.runtime.synchronisation`).
"""

from dpro_search.runtime.schemes.coordinator import Coordinator
from dpro_search.runtime.schemes.goal import Goal, LossWindow
from dpro_search.runtime.schemes.members import Commit
from dpro_search.runtime.schemes.pace import Pace, parse_paces
from dpro_search.runtime.schemes.rules import Order
from dpro_search.runtime.schemes.schemes import (
    Accumulation,
    Adacomm,
    Adsp,
    Asp,
    Bsp,
    Diloco,
    FixedAdacomm,
    LocalSgd,
    Scheme,
    Ssp,
    parse_scheme,
)

__all__ = [
    "Accumulation",
    "Adacomm",
    "Adsp",
    "Asp",
    "Bsp",
    "Commit",
    "Coordinator",
    "Diloco",
    "FixedAdacomm",
    "Goal",
    "LocalSgd",
    "LossWindow",
    "Order",
    "Pace",
    "Scheme",
    "Ssp",
    "parse_paces",
    "parse_scheme",
]
