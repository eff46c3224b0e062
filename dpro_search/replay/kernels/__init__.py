"""Compiled passes over the arrays of a `Layout`; they release the GIL.

Constants of other modules come as arguments: numba's cache does not see their changes.
"""
