"""Times exchanges of groups of ranks on Gloo, as a rank of a job that torchrun's variables describe.

    python dpro_search_mesh_worker.py OUT GROUPS SIZES SECONDS

GROUPS are ``stride x size`` (``1x2,2x2``): every rank is in a group of each, which exchange at the same time. SIZES are bytes.
For each group, exchange and size, calls are repeated for about SECONDS. Before each, ranks compute for a while, as in a job: links
rest, caches hold other data, and ranks that share a core come to the exchange one after another. Writes
``OUT-RANK.json``: a list of [exchange, stride, size, bytes, [[begin_us, end_us], ...]]; ranks of one machine read one clock.
PyTorch only; Python 3.8 and later.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

COMPUTED_S = 0.005  # of a rank's own processor time
FEWEST, MOST = 5, 25


def main():
    out, groups, sizes, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = []
    for text in groups.split(","):
        stride, size = map(int, text.split("x"))
        group_of_rank = None
        for ranks in _groups(world, stride, size):
            group = dist.new_group(ranks)
            if rank in ranks:
                group_of_rank = group, ranks
        for name, exchange in EXCHANGES.items():
            for size_bytes in map(int, sizes.split(",")):
                call = exchange(group_of_rank[0], group_of_rank[1], rank, size_bytes)
                rows.append([name, stride, size, size_bytes, _spans(call, float(seconds))])
    with open("%s-%d.json" % (out, rank), "w") as file:
        json.dump(rows, file)
    dist.destroy_process_group()


def _groups(world, stride, size):
    for block in range(0, world, stride * size):
        for first in range(block, block + stride):
            yield list(range(first, first + stride * size, stride))


def _spans(call, seconds):
    call()
    calls = torch.zeros(1)
    began = time.monotonic()
    _compute()
    call()
    calls[0] = seconds / max(time.monotonic() - began, 1e-6)
    dist.all_reduce(calls, op=dist.ReduceOp.MIN)
    spans = []
    for _ in range(int(min(max(calls.item(), FEWEST), MOST))):
        dist.barrier()
        _compute()
        begin = time.monotonic_ns() / 1e3
        call()
        spans.append([begin, time.monotonic_ns() / 1e3])
    return spans


def _compute():
    began, product = time.thread_time(), torch.ones(256, 256)
    while time.thread_time() < began + COMPUTED_S:
        product = product @ product / 256


def _all_reduce(group, ranks, rank, size_bytes):
    tensor = torch.ones(max(size_bytes // 4, 1))
    return lambda: dist.all_reduce(tensor, group=group)


def _all_gather(group, ranks, rank, size_bytes):
    part = torch.ones(max(size_bytes // 4 // len(ranks), 1))
    whole = torch.empty(part.numel() * len(ranks))
    return lambda: dist.all_gather_into_tensor(whole, part, group=group)


def _reduce_scatter(group, ranks, rank, size_bytes):
    part = torch.ones(max(size_bytes // 4 // len(ranks), 1))
    whole = torch.ones(part.numel() * len(ranks))
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def _send_recv(group, ranks, rank, size_bytes):
    """From the first rank of a group to the second, and back: two messages."""
    tensor = torch.ones(max(size_bytes // 4, 1))
    place = ranks.index(rank)

    def there_and_back():
        if place == 0:
            dist.isend(tensor, ranks[1], group=group).wait()
            dist.irecv(tensor, ranks[1], group=group).wait()
        elif place == 1:
            dist.irecv(tensor, ranks[0], group=group).wait()
            dist.isend(tensor, ranks[0], group=group).wait()

    return there_and_back


EXCHANGES = {"all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "send_recv": _send_recv}


if __name__ == "__main__":
    main()
