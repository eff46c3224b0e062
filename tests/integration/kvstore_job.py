"""Small MXNet jobs for the recorder's tests: `python kvstore_job.py KIND [STEPS]`."""

import os
import signal
import sys
import threading
from pathlib import Path

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet_shortcuts import shortcuts


class TwoInputs(nn.HybridBlock):
    """Two layers whose results are added."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.left, self.right = nn.Dense(10), nn.Dense(10)

    def hybrid_forward(self, _, left, right):
        return self.left(left) + self.right(right)


def kill_a_server():
    """As if its machine had failed."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_server = b"DMLC_ROLE=server" in (process / "environ").read_bytes().split(b"\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if is_server and parent == os.getppid():  # the launcher
            os.kill(int(process.name), signal.SIGKILL)
            return


def main():
    kind = sys.argv[1]
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 14
    mx.random.seed(0)
    two = kind == "two-inputs"
    net = TwoInputs() if two else shortcuts(1024 if kind == "wide" else 96)
    net.initialize(mx.init.Xavier())
    if kind != "imperative":
        net.hybridize()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    store = "local" if kind == "local" else "dist_sync"
    on_store = False if kind == "p3" else None
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=on_store)
    inputs, labels = mx.nd.random.normal(shape=(16, 32)), mx.nd.array([i % 10 for i in range(16)])
    for step in range(steps):
        with autograd.record():
            loss = loss_of(net(inputs, inputs) if two else net(inputs), labels)
        loss.backward()
        trainer.step(16)
        value = float(loss.mean().asscalar())
        if kind == "fails" and step == 3:
            raise SystemExit("the script failed on its own")
        if kind == "kills-a-server" and step == 3:
            kill_a_server()
        if step == 3 and (kind == "hangs" or (kind == "hangs-with-a-bound" and "MXNET_KVSTORE_BIGARRAY_BOUND" in os.environ)):
            print("begun", flush=True)
            threading.Event().wait()
    mx.nd.waitall()  # MXNet drops at its end what it has not begun, and the other worker would wait for it
    print("loss", value.hex(), flush=True)


if __name__ == "__main__":
    main()
