"""Programs that time ops, clusters of ops and exchanges in an environment with a framework."""
