"""One MXNet worker that learns handwritten digits: ``kvstore_digits_job.py DIGITS STEP_S [STEPS]``; prints JSON lines.

STEP_S has a number of seconds for each worker, as in ``0.02,0.04``. Without STEPS it trains until the job's target. With
DPRO_SEARCH_SYNCHRONISATION=dist_sync it is the plain script of STEPS steps, recorded alike: what the schemes are compared with.
``--module``: the older interface of MXNet; ``--impatient``: the job must begin within two seconds.
"""

import json
import os
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from dpro_search.errors import DproSearchError
from dpro_search.runtime.schemes import Pace
from dpro_search.runtime.synchronisation import synchronise
from dpro_search.runtime.synchronisation.kvstore import store as kvstore
from dpro_search.runtime.synchronisation.recording import RecordedCommit, write_record
from dpro_search.runtime.synchronisation.worker import Pacer

BATCH, RATE = 16, 0.2


def batches(digits, worker):
    """Endless, other ones for each worker."""
    draws = np.random.default_rng((int(os.environ.get("DPRO_SEARCH_SEED") or "0"), worker))
    while True:
        rows = draws.integers(len(digits["target"]), size=BATCH)
        yield mx.nd.array(digits["data"][rows] / 16.0), mx.nd.array(digits["target"][rows])


def network():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(32, activation="relu", in_units=64), gluon.nn.Dense(10, in_units=32))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def with_gluon(digits, worker, pace, steps):
    """The script that users write, with the two lines."""
    net, loss_of = network(), gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": RATE}, kvstore=None)
    sync = synchronise(net, trainer, pace=pace, silent_s=3.0)
    say(event="joined")
    for step, (inputs, labels) in enumerate(batches(digits, worker)):
        if not sync.running or step == steps:
            break
        with autograd.record():
            loss = loss_of(net(inputs), labels)
        loss.backward()
        sync.step(loss)
        if step == 4:
            say(event="training")
    return sync


def with_module(digits, worker, pace, steps):
    """The same with the older interface."""
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=32)
    symbol = mx.sym.FullyConnected(mx.sym.Activation(symbol, act_type="relu"), num_hidden=10)
    module = mx.mod.Module(mx.sym.SoftmaxOutput(symbol, name="softmax"))
    module.bind(data_shapes=[("data", (BATCH, 64))], label_shapes=[("softmax_label", (BATCH,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore=None, optimizer="sgd", optimizer_params={"learning_rate": RATE})
    sync = synchronise(module, None, pace=pace, silent_s=3.0)
    for step, (inputs, labels) in enumerate(batches(digits, worker)):
        if not sync.running or step == steps:
            break
        module.forward_backward(mx.io.DataBatch([inputs], [labels]))
        chances = mx.nd.pick(module.get_outputs()[0], labels)
        sync.step(-mx.nd.log(chances))
    return sync


def plain(digits, pace, steps):
    """Without dpro-search's schemes: all wait for all, on MXNet's own dist_sync."""
    net, loss_of = network(), gluon.loss.SoftmaxCrossEntropyLoss()
    store = mx.kv.create("dist_sync")
    worker, workers = int(os.environ["RANK"]), store.num_workers
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": RATE}, kvstore=store)
    pacer, commits, step_s = Pacer(pace), [], 0.0
    begun = time.monotonic()
    for _, (inputs, labels) in zip(range(steps), batches(digits, worker)):
        with autograd.record():
            loss = loss_of(net(inputs), labels)
        loss.backward()
        value = float(loss.mean().asscalar())
        step_s += pacer.end_step()
        pacer.half_commit()
        trainer.step(BATCH * workers)
        mx.nd.waitall()
        pacer.half_commit()
        commits.append(RecordedCommit(time.monotonic() - begun, 1, 1.0 / workers, 0.0, value, 0.001, 0.0))
        pacer.begin_step()
    write_record(
        Path(os.environ["DPRO_SEARCH_RECORD"]),
        run="plain",
        framework="mxnet",
        scheme="bsp",
        worker=worker,
        workers=workers,
        target_loss=float(os.environ["DPRO_SEARCH_TARGET_LOSS"]),
        elements=64 * 32 + 32 + 32 * 10 + 10,
        step_s=step_s / steps,
        paced=True,
        late_steps=pacer.late_steps,
        commits=commits,
    )


def say(**facts):
    print(json.dumps(facts), flush=True)


def main():
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    if "--impatient" in sys.argv:
        kvstore.START_S = 2.0
    digits, worker = dict(np.load(words[0])), int(os.environ["RANK"])
    pace = Pace(step_s=[float(each) for each in words[1].split(",")][worker], commit_s=0.004)
    steps = int(words[2]) if len(words) > 2 else None
    seed = int(os.environ.get("DPRO_SEARCH_SEED") or "0")
    mx.random.seed(seed)
    np.random.seed(seed)
    if os.environ["DPRO_SEARCH_SYNCHRONISATION"] == "dist_sync":
        plain(digits, pace, steps)
        return 0
    train = with_module if "--module" in sys.argv else with_gluon
    try:
        sync = train(digits, worker, pace, steps)
    except DproSearchError as error:
        say(event="failed", error=str(error))
        return error.exit_code
    say(event="done", **sync.facts())
    sync.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
