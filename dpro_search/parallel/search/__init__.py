"""The search for a described job's strategy: candidates, bounds, their order, and changes of single settings."""
