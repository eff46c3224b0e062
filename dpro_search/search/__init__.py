"""Search over plans: samplers propose plans, an objective predicts their cost, a study records the trials."""

from dpro_search.search.objective import Objective
from dpro_search.search.result import RankedPlan, SearchResult
from dpro_search.search.run_folder import Trial
from dpro_search.search.study import run_search

__all__ = ["Objective", "RankedPlan", "SearchResult", "Trial", "run_search"]
