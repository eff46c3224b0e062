"""Ranks of MPI that sum by `dpro_search_all_reduce`, and print what went wrong, or "done".

mpirun -np N python all_reduce_job.py sums | library ALGORITHMS | checked | differs | gone | ddp
"""

import os
import signal
import sys
import time

import numpy as np
from dpro_search_all_reduce import ALGORITHMS, AllReduce, CheckedAllReduce, Choice
from dpro_search_all_reduce.memory import StagedMemory


def sums(all_reduce):
    """All algorithms, types, odd counts, segments; averages; bits by rank; 16-bit floats."""
    rank, ranks = all_reduce.rank, all_reduce.ranks
    for algorithm in (*ALGORITHMS, "native"):
        for count in (0, 1, 7, 1001):
            for dtype in ("float32", "float64", "int32", "int64", "complex64"):
                rows = [(np.arange(count) % 13 + one).astype(dtype) for one in range(ranks)]
                for segment_bytes in (0, 256):
                    total = all_reduce.sum(rows[rank].copy(), algorithm=algorithm, segment_bytes=segment_bytes)
                    assert (total == sum(rows)).all(), (algorithm, count, dtype, segment_bytes)
    average = all_reduce.sum(np.full((3, 5), rank, "float32"), average=True)
    assert (average == np.float32((ranks - 1) / 2)).all()
    assert average.shape == (3, 5)
    rows = (10.0 ** np.random.default_rng(0).uniform(-4, 4, (ranks, 999))).astype("float32")
    expected = rows[0]
    for row in rows[1:]:
        expected = expected + row
    assert (all_reduce.sum(rows[rank].copy(), by_rank=True) == expected).all()
    assert all_reduce.algorithm(16)[0].startswith("native")
    assert all_reduce.algorithm(16, on_device=True)[0] == "recursive-doubling"
    halves = all_reduce.sum(np.full(4, 2048 if rank == 0 else 1, "float16"))
    assert (halves == np.float16(2048 + ranks - 1)).all(), halves


def library(all_reduce):
    """The MPI library's own algorithms, in different orders of addition; one that it has not is left to its choice."""
    rank, ranks = all_reduce.rank, all_reduce.ranks
    rows = (10.0 ** np.random.default_rng(0).uniform(-4, 4, (ranks, 4001))).astype("float32")
    bits = {}
    for algorithm in sys.argv[2].split(","):
        for _ in range(2):  # the second call takes the short way
            total = all_reduce.sum(rows[rank].copy(), algorithm=algorithm)
            np.testing.assert_allclose(total, rows.sum(axis=0), rtol=1e-5)
            again = rows[rank].copy()
            bits[algorithm] = all_reduce.sum(again, algorithm=algorithm).tobytes()
            again[:] = rows[rank]
            assert all_reduce.sum(again, algorithm=algorithm).tobytes() == bits[algorithm]
    all_reduce.close()
    if rank == 0:
        print("%d different sums" % len(set(bits.values())))


def checked(all_reduce):
    """A table's bad choice is replaced by what is faster here, and sums stay right; times are those of a quiet library."""
    ranges = [{"from_bytes": 0, "algorithm": "gather"}, {"from_bytes": 1 << 23, "algorithm": "native", "alternatives": ["ring"]}]
    table = {"version": 1, "tables": [{"ranks": all_reduce.ranks, "ranks_per_host": all_reduce.ranks, "ranges": ranges}]}
    summing = CheckedAllReduce(AllReduce(choice=Choice(table)), say=print)
    for count in (1 << 20, 1 << 21):
        for step in range(30):
            time.sleep(0.1 if step < 8 else 0.0)  # computes: the check may cost a share of a step
            total = summing.sum(np.full(count, step + all_reduce.rank, "float32"))
            assert (total == all_reduce.ranks * step + sum(range(all_reduce.ranks))).all(), (count, step)


def differs(all_reduce):
    """Rank 1 has another count, then the last rank another type."""
    last = all_reduce.ranks - 1
    for buffer in (np.zeros(100 + (all_reduce.rank == 1)), np.zeros(100, "float32" if all_reduce.rank == last else "int32")):
        try:
            all_reduce.sum(buffer)
        except ValueError as error:
            print("said: %s" % error)


def gone(all_reduce):
    """The last rank stops between two all-reduces."""
    all_reduce.sum(np.zeros(1 << 16), algorithm="ring")
    if all_reduce.rank == all_reduce.ranks - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        all_reduce.sum(np.zeros(1 << 16), algorithm="ring")
    except TimeoutError as error:
        print("said after %.0f s: %s" % (time.monotonic() - began, error), flush=True)
    all_reduce._comm.Abort(0)


def ddp(all_reduce):
    """Training under DistributedDataParallel with the hook gives the losses of training without it."""
    import torch
    import torch.distributed as dist
    from dpro_search_all_reduce.ddp import hook
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=all_reduce.rank, world_size=all_reduce.ranks)
    losses = []
    for hooked in (False, True):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
        if hooked:
            model.register_comm_hook(None, hook(all_reduce))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = torch.Generator().manual_seed(all_reduce.rank)
        for _ in range(8):
            x = torch.randn(16, 64, generator=data)
            loss = (model(x) - x[:, :8]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    np.testing.assert_allclose(losses[8:], losses[:8], rtol=1e-5)
    assert 0 < all_reduce.registry.asked < 8, "buckets are asked again in every step"
    narrow = torch.tensor([256.0 if all_reduce.rank == 0 else 1.0]).bfloat16()  # 256 + 1 is 256 in bfloat16
    assert all_reduce.sum(narrow).item() == 258, narrow
    staged, held = AllReduce(), torch.full((5,), 256.0 if all_reduce.rank == 0 else 1.0).bfloat16()
    staged.registry.memory = lambda tensor: StagedMemory(tensor)  # as of a device whose memory MPI does not know
    assert (staged.sum(held, by_rank=True) == 258).all(), held
    assert (staged.sum(torch.ones(3), algorithm="ring") == staged.ranks).all()
    dist.destroy_process_group()


if __name__ == "__main__":
    mode = sys.argv[1]
    group = AllReduce(time_limit_s=3.0 if mode == "gone" else 60.0, check=mode == "differs")
    {"sums": sums, "library": library, "checked": checked, "differs": differs, "gone": gone, "ddp": ddp}[mode](group)
    print("done")
