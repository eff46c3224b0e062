"""Sums of halves by BytePS beside those of float32, rounded: `python byteps_sums_job.py`; prints how many differ.

Each name is added up once. A server answers from the buffer into which it takes the next sum of that name (`SendPullResponse` of
BytePS copies nothing), and of sums that followed each other without a pause one or two small ones were once wrong.
"""

import byteps.mxnet as bps
import mxnet as mx
import numpy as np


def main():
    bps.init()
    wrong = 0
    for length in (1, 7, 8, 9, 1000, 2_500_003):
        for power in (0, 2, 4, 6):  # of 1e-6, halves are subnormal
            name = f"halves_{length}_{power}"
            bps.byteps_declare_tensor(name)
            draws = [np.random.default_rng(10 * power + worker).normal(size=length, scale=10.0**-power) for worker in range(2)]
            parts = [draw.astype(np.float16) for draw in draws]
            gradient = mx.nd.array(parts[bps.rank()], dtype="float16")
            bps.byteps_push_pull(gradient, name=name, is_average=False)
            whole = parts[0].astype(np.float32) + parts[1].astype(np.float32)
            wrong += int((gradient.asnumpy() != whole.astype(np.float16)).sum())
    print(f"wrong: {wrong}", flush=True)


if __name__ == "__main__":
    main()
