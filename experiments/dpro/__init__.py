"""The tables and figures of the dPRO paper (Hu et al., MLSys 2022) on recordings of our own: `python -m experiments.dpro`.

A module for each: `replay_accuracy` (beside Daydream), `alignment`, `gains` and `memory`. Each runs by itself as
well, prints its section and keeps its rows, so that one that was interrupted goes on.
"""
