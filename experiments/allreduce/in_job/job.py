"""A paced training job: `python job.py SCHEME FOLDER`; runs in the framework's environment (standard library and the framework).

Compute is a wait of the time that one worker was recorded to take; what is exchanged is real: tensors of the network's shapes, at
the moments of the backward pass at which they come into being, by the framework's own code. ``FOLDER/cases.json`` lists what is to
be run, one after the other; rank 0 (of parameter servers of TensorFlow: the coordinator) writes ``FOLDER/result-N.json`` for each:

    {"kind": "training", "waits_us": [forward, moment 1, ...], "moments": [[elements, ...], ...], "warm_up": 2, "steps": 5}
        gives {"ends_s": [...]}: when the last warm-up step and each step ended
    {"kind": "latency", "sizes_bytes": [...], "calls": [...], "bursts": [[elements, ...], ...], "burst_calls": 3}
        gives {"us": [...], "bursts_us": [...]}: the mean time of an exchange of one tensor, and of several that are there at once
"""

import importlib
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

_MODULES = {
    "tf-ps": "tensorflow_servers",
    "tf-ring": "tensorflow_ring",
    "horovod-mpi": "tensorflow_horovod",
    "horovod-gloo": "tensorflow_horovod",
    "mxnet-kvstore": "mxnet_store",
    "mxnet-byteps": "mxnet_store",
    "ddp-gloo": "torch_ddp",
    "ddp-hook": "torch_ddp",
    "ddp-hook-mpich": "torch_ddp",
}


def main():
    scheme, folder = sys.argv[1], sys.argv[2]
    with open(os.path.join(folder, "cases.json")) as file:
        cases = json.load(file)
    job = importlib.import_module(_MODULES[scheme]).Job(scheme, folder)
    for number, case in enumerate(cases):
        found = _trained(job, case) if case["kind"] == "training" else _latency(job, case)
        if job.reports:
            _write(os.path.join(folder, "result-%d.json" % number), dict(found, version=job.version))
    job.stop()


def _trained(job, case):
    step = job.training(case["waits_us"], case["moments"])
    for _ in range(case["warm_up"]):
        step()
    ends = [time.monotonic()]
    for _ in range(case["steps"]):
        step()
        ends.append(time.monotonic())
    return {"ends_s": ends}


def _latency(job, case):
    found = []
    for size_bytes, calls in zip(case["sizes_bytes"], case["calls"]):
        run = job.exchange(size_bytes // 4)
        if calls > 1:
            run()
        begun = time.monotonic()
        for _ in range(calls):
            run()
        found.append((time.monotonic() - begun) / calls * 1e6)
    return {"us": found, "bursts_us": [_burst(job, elements, case["burst_calls"]) for elements in case["bursts"]]}


def _burst(job, elements, calls):
    step = job.training([1.0, 1.0], [elements])
    step()
    begun = time.monotonic()
    for _ in range(calls):
        step()
    return (time.monotonic() - begun) / calls * 1e6


def _write(path, value):
    with open(path + ".tmp", "w") as file:
        json.dump(value, file)
    os.rename(path + ".tmp", path)


if __name__ == "__main__":
    main()
