"""Profiles of jobs on a GPU, and what-ifs and plans predicted from them beside runs that were measured.

`record` runs on the machine with the GPU and needs PyTorch alone; `score` needs `dpro_search` alone. See `gpu_jobs.md`.
"""
