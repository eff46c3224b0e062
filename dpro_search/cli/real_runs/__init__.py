"""Verbs about real runs: those that this program makes, and those that somebody else made."""
