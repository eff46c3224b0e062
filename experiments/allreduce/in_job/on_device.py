"""All-reduces of tensors on a GPU that ranks of one host share: `mpirun -n N python on_device.py OUT SECONDS [device]`.

Ways differ in where additions are made and what messages pass through: "device" (kernels; messages by a CUDA-aware MPI), "staged"
(copied to pinned memory of the host, added there, copied back) and PyTorch's Gloo, which stages too. The sums of each way are
checked first. Ways are timed in turn; "asked" is a way whose registry forgets each buffer. Rank 0 writes OUT, a JSON:

    {"ranks": 2, "gpu": "...", "mpi": "...", "rows": [[way, algorithm, bytes, [us of each round]], ...], "failed": {way: reason},
     "ddp": {"step_ms": {way: [...]}, "largest_difference": {way: ...}}}
"""

import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from dpro_search_all_reduce import AllReduce  # before torch: MPI is initialised first
from mpi4py import MPI

SIZES_BYTES = tuple(4**power for power in range(1, 15))  # to 256 MiB
ALGORITHMS = "recursive-doubling", "halving-doubling", "ring"
ROUNDS, MOST_CALLS = 5, 200
SEGMENT_BYTES = 1 << 22  # of rings; smaller ones cost a kernel and a wait each


def main():
    out, seconds, places = sys.argv[1], float(sys.argv[2]), ("staged", *sys.argv[3:])
    began = time.monotonic()
    torch.cuda.set_device(0)
    reduces = {place: AllReduce(device_aware=place == "device", time_limit_s=20.0) for place in places}
    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(29600 + ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = {"ranks": ranks, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": [], "failed": {}}
    found["mpi"] = MPI.Get_library_version()

    def write():
        if rank == 0:
            with open(out, "w") as file:
                json.dump(found, file)

    ways = {"gloo": lambda tensor: dist.all_reduce(tensor)}
    ways["staged native"] = lambda tensor: reduces["staged"].sum(tensor, algorithm="native")
    for place in places:
        for algorithm in ALGORITHMS:
            ways["%s %s" % (place, algorithm)] = _way(reduces[place], algorithm)
    for name, way in list(ways.items()):
        reason = agreed(_refused(way, rank, ranks))
        if reason:
            found["failed"][name] = reason
            del ways[name]
    for place, reduce in reduces.items():
        if place + " halving-doubling" in ways:
            found["failed"].update({"%s %s" % (place, key): text for key, text in _checked(reduce, rank, ranks).items()})
            ways[place + " halving-doubling, asked"] = _forgetting(reduce, "halving-doubling")
    write()
    if rank == 0:
        print(sorted(ways), found["failed"], flush=True)
    for size_bytes in SIZES_BYTES:
        late = MPI.COMM_WORLD.allreduce(time.monotonic() - began, MPI.MAX) > seconds * 0.8
        if late:
            found["failed"]["%d bytes and more" % size_bytes] = "no time left"
            break
        tensor = torch.zeros(max(size_bytes // 4, 1), device="cuda")
        calls = {name: _calls(way, tensor, ranks) for name, way in ways.items()}
        rounds = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                rounds[name].append(_timed(way, tensor, calls[name]))
        found["rows"] += [[*name.partition(" ")[::2], size_bytes, values] for name, values in rounds.items()]
        write()
    try:
        found["ddp"] = _ddp({place: reduce for place, reduce in reduces.items() if place + " ring" in ways}, rank)
    except Exception as error:
        found["failed"]["ddp"] = repr(error)
    write()
    dist.destroy_process_group()


def _way(reduce, algorithm):
    segment = SEGMENT_BYTES if algorithm == "ring" else None
    return lambda tensor: reduce.sum(tensor, algorithm=algorithm, segment_bytes=segment)


def _forgetting(reduce, algorithm):
    def run(tensor):
        reduce.registry.forget()
        reduce.sum(tensor, algorithm=algorithm)

    return run


def agreed(reason):
    """The first rank's reason why a way cannot be used."""
    return next((one for one in MPI.COMM_WORLD.allgather(reason) if one), None)


def _refused(way, rank, ranks):
    """Why a way does not give the sum."""
    try:
        for count in (1, 1001, 1 << 20):
            rows = [torch.from_numpy(np.random.default_rng(one).integers(-99, 99, count).astype("float32")) for one in range(ranks)]
            tensor = rows[rank].cuda()
            way(tensor)
            if not torch.equal(tensor.cpu(), sum(rows)):
                return "wrong sum of %d elements" % count
    except Exception as error:
        return repr(error)


def _checked(reduce, rank, ranks):
    """Types, by rank, 16-bit floats, averages; and sums of what kernels still compute when they are asked for."""
    failed = {}
    for dtype in (torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16):
        rows = [torch.from_numpy(np.random.default_rng(one).integers(-9, 9, 777)).to(dtype) for one in range(ranks)]
        found = reduce.sum(rows[rank].cuda(), by_rank=dtype in (torch.float16, torch.bfloat16)).cpu()
        if not torch.equal(found, sum(row.double() for row in rows).to(dtype)):
            failed[str(dtype)] = "wrong sum"
    product = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):  # kernels of some ms, whose end nobody waits for
        made = product
        for _ in range(8):
            made = made @ product / 64
        row = torch.where(made.sum() == 12345.0, 0.0, 1.0) * torch.ones(1 << 20, device="cuda") * (rank + 1)
        if not (reduce.sum(row, algorithm="ring") == ranks * (ranks + 1) / 2).all():
            failed["computed when asked for"] = "wrong sum"
    return {key: reason for key, reason in ((key, agreed(failed.get(key))) for key in _NAMES) if reason}


_NAMES = [*map(str, (torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16)), "computed when asked for"]


def _calls(way, tensor, ranks):
    """As many as take some 60 ms, the same on all ranks."""
    way(tensor)
    once = _timed(way, tensor, 1)
    return int(MPI.COMM_WORLD.bcast(min(max(0.06e6 / once, 1), MOST_CALLS)))


def _timed(way, tensor, calls):
    """us of a call, of the slowest rank."""
    torch.cuda.synchronize()
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    for _ in range(calls):
        way(tensor)
    torch.cuda.synchronize()
    return MPI.COMM_WORLD.allreduce((time.perf_counter() - began) * 1e6 / calls, MPI.MAX)


def _ddp(reduces, rank):
    """ms of DistributedDataParallel's steps in turn, on Gloo and by the hook; how far parameters are from Gloo's behind them."""
    from dpro_search_all_reduce.ddp import hook
    from torch.nn.parallel import DistributedDataParallel

    models, ends, steps = {}, {}, {}
    for name in ("gloo", *reduces):
        torch.manual_seed(0)
        width = 2048
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(12)]).cuda()
        model = DistributedDataParallel(model, device_ids=[0])
        if name != "gloo":
            model.register_comm_hook(None, hook(reduces[name]))
        models[name] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(rank + 1)
    inputs = torch.randn(10, 256, 2048, device="cuda")
    for number in range(10):
        for name, (model, optimizer) in models.items():
            torch.cuda.synchronize()
            MPI.COMM_WORLD.Barrier()
            began = time.perf_counter()
            model(inputs[number]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            steps.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
    for name, (model, _) in models.items():
        ends[name] = torch.cat([each.detach().flatten() for each in model.parameters()])
    return {
        "step_ms": {name: values[2:] for name, values in steps.items()},
        "largest_difference": {name: float((end - ends["gloo"]).abs().max()) for name, end in ends.items()},
    }


if __name__ == "__main__":
    main()
