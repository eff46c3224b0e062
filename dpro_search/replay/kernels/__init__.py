"""Compiled passes over the arrays of a `Layout`. They release the GIL; constants come as arguments (numba's cache does not see changes)."""
