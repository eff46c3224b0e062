"""Simulation of a job whose workers commit by a scheme: the time, and with it the convergence."""

from dpro_search.replay.synchronisation.predict import TimeToLoss, ranked, time_to_loss
from dpro_search.replay.synchronisation.progress import EffectiveSteps
from dpro_search.replay.synchronisation.simulate import AppliedCommit, Numerics, Simulated, simulate

__all__ = ["AppliedCommit", "EffectiveSteps", "Numerics", "Simulated", "TimeToLoss", "ranked", "simulate", "time_to_loss"]
