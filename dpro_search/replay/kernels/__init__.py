"""Compiled passes over the arrays of a `Layout`; they release the GIL.

Constants of other modules come as arguments: numba's cache does not see their changes, nor that fields of a `Layout` change places.

What every op goes through is written out, though it looks alike in several passes: numba counts references to each array that a
call takes. With a helper for the latest end of an op's predecessors re-timing took 1.9 times as long, with one for the list of
touched devices replays took 1.4 to 1.9 times as long.
"""
