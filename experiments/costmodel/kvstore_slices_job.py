"""Pushes and pulls arrays by MXNet's KVStore and does nothing else: a worker of `experiments.costmodel.kvstore_slices`.

    python kvstore_slices_job.py ARRAYS ELEMENTS STEPS

The environment says how arrays are cut. Prints one JSON object. MXNet only.
"""

import json
import os
import sys
import time

import mxnet as mx

WARMUP = 5


def main():
    arrays, elements, steps = (int(word) for word in sys.argv[1:])
    store = mx.kv.create("dist_sync")
    weights = [mx.nd.ones((elements,)) for _ in range(arrays)]
    gradients = [mx.nd.ones((elements,)) for _ in range(arrays)]
    for key, weight in enumerate(weights):
        store.init(key, weight)
    priority = os.environ.get("DMLC_PS_VAN_TYPE") == "p3"
    begin_ns = used_ns = 0
    for step in range(WARMUP + steps):
        if step == WARMUP:
            begin_ns, used_ns = time.time_ns(), time.process_time_ns()
        for key in range(arrays):
            if priority:
                store.pushpull(key, gradients[key], out=weights[key], priority=-key)
            else:
                store.push(key, gradients[key], priority=-key)
                store.pull(key, weights[key], priority=-key)
        mx.nd.waitall()
    end_ns, used_ns = time.time_ns(), time.process_time_ns() - used_ns
    print(json.dumps({"begin_ns": begin_ns, "end_ns": end_ns, "cpu_us": used_ns / steps / 1e3}), flush=True)
    time.sleep(1)  # servers live as long, and their core time is read a few times a second


main()
