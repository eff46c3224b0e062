"""Stamps of collectives: when every rank enqueued each of them, waited for it and saw its end."""

from dpro_search.collect.readers.stamps.files import StampFile, StampFolder
from dpro_search.collect.readers.stamps.records import RECORD, RankStamps, StampedGroup

__all__ = ["RECORD", "RankStamps", "StampFile", "StampFolder", "StampedGroup"]
