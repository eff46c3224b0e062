"""Real runs of described jobs: blocks and exchanges that are timed here, and the parts of a measured step."""
