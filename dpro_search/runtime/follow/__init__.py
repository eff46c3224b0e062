"""Helpers that an export copies beside a plan, and that the training script imports to follow it."""
