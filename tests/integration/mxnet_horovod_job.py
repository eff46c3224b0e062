"""Small MXNet + Horovod jobs for the recorder's tests: `python mxnet_horovod_job.py KIND [STEPS]`."""

import sys
import threading

import horovod.mxnet as hvd
import mxnet as mx
from mxnet import autograd, gluon
from mxnet_shortcuts import shortcuts


def main():
    kind = sys.argv[1]
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 14
    hvd.init()
    mx.random.seed(0)
    net = shortcuts()
    net.initialize(mx.init.Xavier())
    if kind != "imperative":
        net.hybridize()
    inputs, labels = mx.nd.random.normal(shape=(16, 32)), mx.nd.array([i % 10 for i in range(16)])
    with autograd.train_mode():
        net(inputs)
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    how = {"num_groups": 2} if kind == "groups" else {"prefix": "net."} if kind == "prefix" else {}
    trainer = hvd.DistributedTrainer(net.collect_params(), "adam" if kind == "adam" else "sgd", {"learning_rate": 0.1}, **how)
    for step in range(steps):
        with autograd.record():
            loss = loss_of(net(inputs), labels)
        loss.backward()
        trainer.step(16)
        value = float(loss.mean().asscalar())
        if kind == "fails" and step == 3 and hvd.rank() == 1:
            raise SystemExit("the script failed on its own")
        if kind == "hangs" and step == 3:
            threading.Event().wait()
    mx.nd.waitall()
    print("loss", value.hex(), flush=True)


if __name__ == "__main__":
    main()
