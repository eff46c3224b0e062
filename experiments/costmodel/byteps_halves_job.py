"""Has BytePS add up arrays and does nothing else: a worker of `experiments.costmodel.byteps_halves`.

    python byteps_halves_job.py ARRAYS ELEMENTS SMALL STEPS KIND SCALE

SMALL arrays of a hundred elements are among the others. KIND is "whole" (float32) or "half" (fp16); each array goes the way of a
gradient in `byteps.mxnet.DistributedTrainer`, from its scaling until it is whole again. Values are normal, of a deviation SCALE.
Prints one JSON object: core time is that of the script and of MXNet's threads, without BytePS's. MXNet and BytePS only.
"""

import json
import sys
import time
from pathlib import Path

import byteps.mxnet as bps
import mxnet as mx
from byteps.mxnet.compression import Compression

WARMUP = 4


def used_ns(threads):
    """CPU time of threads of this process."""
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)


def main():
    arrays, elements, small, steps = (int(word) for word in sys.argv[1:5])
    kind, scale = sys.argv[5], float(sys.argv[6])
    lengths = [length for _ in range(arrays) for length in (elements, *[100] * (small // arrays))]
    gradients = {f"gradient_{number}": mx.nd.random.normal(scale=scale, shape=(length,)) for number, length in enumerate(lengths)}
    for array in gradients.values():  # so that MXNet's threads for copies have started before BytePS's
        array[:] = array.astype("float16").astype("float32")
    mx.nd.waitall()
    own = list(Path("/proc/self/task").iterdir())
    bps.init()
    compressor = Compression.fp16 if kind == "half" else Compression.none
    for name in gradients:
        bps.byteps_declare_tensor(name)
    begin_ns = begin_cpu_ns = 0
    for step in range(WARMUP + steps):
        if step == WARMUP:
            begin_ns, begin_cpu_ns = time.time_ns(), used_ns(own)
        for number, (name, gradient) in enumerate(gradients.items()):
            mx.nd._internal._mul_scalar(gradient, 1.0 / bps.size(), out=gradient)
            compressed, context = compressor.compress(gradient)
            bps.byteps_push_pull(compressed, is_average=False, name=name, priority=-number)
            gradient[:] = compressor.decompress(compressed, context)
        mx.nd.waitall()
    end_ns, cpu_ns = time.time_ns(), used_ns(own) - begin_cpu_ns
    print(json.dumps({"begin_ns": begin_ns, "end_ns": end_ns, "cpu_us": cpu_ns / steps / 1e3}), flush=True)
    time.sleep(1)  # servers live as long, and their core time is read a few times a second


main()
