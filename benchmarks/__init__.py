"""Speed and memory, side by side with baselines in one run."""
