"""The critical path of a replayed iteration: the chain of ops that decides how long it takes, its parts, and what they mean."""
