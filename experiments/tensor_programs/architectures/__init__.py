"""Architectures of published models as functions that list the ops of one forward pass, (op, dims) each."""
