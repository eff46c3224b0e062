"""Synchronisation schemes on MXNet's parameter servers (KVStore, ps-lite)."""
