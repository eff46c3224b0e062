"""Times the stages of PyTorch's PowerSGD hook, with all-reduces that take no time: a job of `experiments.costmodel.powersgd`.

    python powersgd_job.py [--repeats 15] > ROWS

A row of JSON for each bucket and rank: shapes of its gradients, and the median core time in microseconds of what is computed before
the all-reduce of the uncompressed gradients, before that of Ps, before that of Qs, and after it. PyTorch only.
"""

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import torch
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as powersgd

RANKS = (1, 2, 4)
_EVICTED_BYTES = 96 * 2**20  # three times the last cache
# Buckets by the shapes of their gradients: matrices of many forms, one and many; vectors, by themselves and beside matrices.
BUCKETS = (
    [(1024, 1024)],
    [(2048, 2048)],
    [(3000, 2000)],
    [(500, 12000)],
    [(12000, 500)],
    [(100, 40000)],
    [(3500, 3500)],
    [(6000, 2500)],
    [(4096, 1024)],
    [(512, 4096)],
    [(1024, 256)] * 8,
    [(2048, 512)] * 2,
    [(6144, 2048)],
    [(80, 80, 3, 3)] * 20,
    [(160, 96, 1, 1)] * 60,
    [(640, 160)] * 24,
    [(320, 320, 3, 3)] * 4,
    [(96, 96)] * 100,
    [(700, 700)] * 10,
    [(24, 16)] * 150,
    [(1000,)] * 100,
    [(100_000,)] * 10,
    [(640, 160), (640,), (160,)] * 24,
    [(300, 300), (300,), (300,), (300,)] * 30,
    [(2_000_000,), (700, 700)],
)


def stages_us(shapes, rank, repeats):
    """Median core time of each of the four stages, over steps in which the hook has its state already."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    state = powersgd.PowerSGDState(
        SimpleNamespace(size=lambda: 2), matrix_approximation_rank=rank, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
    )
    state.iter = 2
    flat, evicted = torch.empty(sum(sizes)), torch.empty(_EVICTED_BYTES // 4)
    gradients = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
    # What the hook reads of a bucket.
    bucket = SimpleNamespace(buffer=lambda: flat, gradients=lambda: gradients, index=lambda: 0, is_last=lambda: True)
    marks = []

    def all_reduce(tensor, group, async_op):
        marks.append(time.thread_time_ns())
        done = torch.futures.Future()
        done.set_result([tensor])
        return SimpleNamespace(get_future=lambda: done)

    powersgd.dist = SimpleNamespace(all_reduce=all_reduce)
    found = []
    for _ in range(repeats + 2):
        evicted.add_(1.0)
        flat.normal_()  # as DDP does, the bucket is written just before
        marks.clear()
        begun = time.thread_time_ns()
        powersgd.powerSGD_hook(state, bucket).wait()
        marks.append(time.thread_time_ns())
        found.append([(end - start) / 1e3 for start, end in zip([begun, *marks[:-1]], marks, strict=True)])
    return [statistics.median(column) for column in zip(*found[2:], strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for shapes in BUCKETS:
        for rank in RANKS:
            print(json.dumps({"shapes": shapes, "rank": rank, "stages_us": stages_us(shapes, rank, options.repeats)}), flush=True)


if __name__ == "__main__":
    main()
