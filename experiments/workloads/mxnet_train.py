"""Trains one of the workloads with MXNet's KVStore, as a user's script for parameter servers would.

dpro-search collect --framework mxnet --comm kvstore --out T -- python experiments/workloads/mxnet_train.py --model resnet50
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import mxnet as mx
from mxnet import autograd, gluon
from mxnet_models import BUILDERS


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(BUILDERS), required=True)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--batch", type=int, help="samples per worker (default: the workload's own)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    net, inputs, labels = BUILDERS[options.model](**({"batch": options.batch} if options.batch else {}))
    mx.random.seed(options.seed)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore="dist_sync")
    for step in range(options.steps):
        with autograd.record():
            loss = loss_of(net(inputs), labels)
        loss.backward()
        trainer.step(len(labels))
        value = float(loss.mean().asscalar())
        if step % 10 == 0:
            print(f"step {step} loss {value:.6f}", flush=True)
    mx.nd.waitall()  # MXNet drops at its end what it has not begun, and the other workers would wait for it


if __name__ == "__main__":
    main()
