"""Peak memory of the ranks of a described job."""
