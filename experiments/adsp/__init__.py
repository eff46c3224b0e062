"""Synchronisation of workers of unequal speed: the experiments of ADSP (AAAI 2020, arXiv 1911.06949) with real training. See README.md."""
