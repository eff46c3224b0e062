"""Trains a model for some steps in float32 or mixed bfloat16 and profiles the last: a run of `experiments.costmodel.precision`.

    python precision_step.py MODEL float32|mixed_bfloat16 OUT

Writes OUT/xplane.pb and OUT/step.json. One thread. TensorFlow and the standard library only.
"""

import importlib.util
import json
import platform
import shutil
import sys
import time
from pathlib import Path

import tensorflow as tf

SETTLING, TIMED, PROFILED = 4, 10, 6


def main():
    name, policy, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.keras.utils.set_random_seed(0)
    tf.keras.mixed_precision.set_global_policy(policy)
    model, (inputs, labels) = builders()[name]()
    variables = model.trainable_variables
    optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def train_step():
        with tf.GradientTape() as tape:
            loss = loss_of(labels, tf.cast(model(inputs, training=True), tf.float32))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    for _ in range(SETTLING):
        loss = train_step()
    taken = []
    for _ in range(TIMED):
        start = time.perf_counter()
        loss = train_step()
        loss.numpy()
        taken.append((time.perf_counter() - start) * 1e6)
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0, device_tracer_level=0)
    tf.profiler.experimental.start(str(out / "profile"), options=options)
    for _ in range(PROFILED):
        loss = train_step()
    loss.numpy()
    tf.profiler.experimental.stop()
    shutil.move(next((out / "profile").rglob("*.xplane.pb")), out / "xplane.pb")
    shutil.rmtree(out / "profile")
    versions = {"tensorflow": tf.__version__, "python": platform.python_version()}
    found = {"batch": int(inputs.shape[0]), "step_us": taken, "loss": float(loss), "versions": versions}
    (out / "step.json").write_text(json.dumps(found))


def builders():
    """Those of models.py beside this file, which cannot be imported by its name: it imports the workloads' models.py."""
    spec = importlib.util.spec_from_file_location("costmodel_models", Path(__file__).with_name("models.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BUILDERS


if __name__ == "__main__":
    main()
