"""Synchronisation of workers of unequal speed: the experiments of ADSP (Hu et al., AAAI 2020) with real training. See README.md."""
