"""Tuned GPU kernels as tensor programs: what their sources and parameters say, and predictors of their times on other devices."""
