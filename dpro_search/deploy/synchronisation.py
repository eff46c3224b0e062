"""Exports of version 0.1 tell users to import `synchronise` from here, and their training scripts do."""

from dpro_search.runtime.synchronisation import synchronise

__all__ = ["synchronise"]
