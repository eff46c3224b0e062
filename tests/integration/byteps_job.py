"""A small job of MXNet with BytePS for the recorder's tests: `python byteps_job.py [STEPS] [fp16]`."""

import sys

import byteps.mxnet as bps
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 14
    bps.init()
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(96, activation="relu"), nn.Dense(96, activation="relu"), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    compression = {"fp16": True} if sys.argv[2:] == ["fp16"] else None
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, compression_params=compression)
    inputs, labels = mx.nd.random.normal(shape=(16, 32)), mx.nd.array([i % 10 for i in range(16)])
    for _ in range(steps):
        with autograd.record():
            loss = loss_of(net(inputs), labels)
        loss.backward()
        trainer.step(16)
        value = float(loss.mean().asscalar())
    mx.nd.waitall()
    print("loss", value.hex(), flush=True)


if __name__ == "__main__":
    main()
