"""Synchronisation of workers of unequal speed: the experiments of ADSP (arXiv 1911.06949) with real training. See README.md."""
