"""Which rank, host or link makes the others of a running job wait: `ranks`, and `Watch` while it runs."""

from dpro_search.analysis.ranks.answer import Finding, Parting, RanksAnswer, RankShares
from dpro_search.analysis.ranks.watch import Watch, ranks

__all__ = ["Finding", "Parting", "RankShares", "RanksAnswer", "Watch", "ranks"]
