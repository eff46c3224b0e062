"""Trains one of the workloads with MXNet, as a user's script for parameter servers, Horovod or BytePS would.

dpro-search collect --framework mxnet --comm kvstore --out T -- python experiments/workloads/mxnet_train.py --model resnet50
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import mxnet as mx
from mxnet import autograd, gluon
from mxnet_models import BUILDERS

SGD = {"learning_rate": 0.01}
PLAN = os.environ.get("DPRO_SEARCH_PLAN", "")


def planned():
    """Arguments of the Trainer that a plan in DPRO_SEARCH_PLAN asks for."""
    if not PLAN or not os.path.exists(os.path.join(PLAN, "trainer.py")):
        return {}
    sys.path.insert(0, PLAN)
    from trainer import planned_options

    return planned_options()


def kvstore_trainer(parameters):
    """Servers update the weights."""
    return gluon.Trainer(parameters, "sgd", dict(SGD), kvstore="dist_sync", **planned())


def p3_trainer(parameters):
    """Workers update the weights; the environment asks for priority slices (DMLC_PS_VAN_TYPE=p3)."""
    return gluon.Trainer(parameters, "sgd", dict(SGD), kvstore="dist_sync", update_on_kvstore=False, **planned())


def horovod_trainer(parameters):
    """Horovod averages the gradients, workers update the weights."""
    import horovod.mxnet as hvd

    hvd.init()
    hvd.broadcast_parameters(parameters, root_rank=0)
    return hvd.DistributedTrainer(parameters, "sgd", dict(SGD), **planned())


def byteps_trainer(parameters):
    """BytePS's servers sum the gradients, workers update the weights."""
    import byteps.mxnet as bps

    bps.init()
    return bps.DistributedTrainer(parameters, "sgd", dict(SGD), **planned())


TRAINERS = {"kvstore": kvstore_trainer, "p3": p3_trainer, "horovod": horovod_trainer, "byteps": byteps_trainer}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(BUILDERS), required=True)
    parser.add_argument("--comm", choices=sorted(TRAINERS), default="kvstore")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--batch", type=int, help="samples per worker (default: the workload's own)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    net, inputs, labels = BUILDERS[options.model](**({"batch": options.batch} if options.batch else {}))
    mx.random.seed(options.seed)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    with autograd.train_mode():
        net(inputs)  # shapes that follow from the input
    trainer = TRAINERS[options.comm](net.collect_params())
    for step in range(options.steps):
        with autograd.record():
            loss = loss_of(net(inputs), labels)
        loss.backward()
        trainer.step(len(labels))
        value = float(loss.mean().asscalar())
        if step < 20 or step % 10 == 0:
            print(f"step {step} loss {value:.6f}", flush=True)
    mx.nd.waitall()  # MXNet drops at its end what it has not begun, and the other workers would wait for it


if __name__ == "__main__":
    main()
