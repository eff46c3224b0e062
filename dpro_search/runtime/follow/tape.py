"""Fuses gradients in the exact groups of a plan. Copy beside `groups.json` and import it from the training script:

    from tape import planned_tape

    with tf.GradientTape() as tape:
        loss = ...
    tape = planned_tape(tape, model.trainable_variables)     # in place of hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)

With micro-batches, whose gradients are summed before they are averaged over the ranks:

    loss, gradients = planned_gradients(compute, inputs, labels)     # of micro_batches
    gradients = planned_averages(gradients, model.trainable_variables)

Keras: `hvd.DistributedOptimizer(optimizer, groups=planned_groups(model.trainable_variables))` of `horovod.tensorflow.keras`.
The variables of `horovod.env` must be set, or Horovod merges the groups again.
Needs TensorFlow and Horovod, nothing else; Python 3.8 and later.
"""

import json
import os
from pathlib import Path

_PLAN = Path(__file__).resolve().with_name("groups.json")


def planned_tape(tape, variables, **options):
    """A tape whose gradients are averaged over all ranks, one all-reduce for each group of the plan.

    Parameters
    ----------
    tape : tf.GradientTape
    variables : list of tf.Variable
        The sources that `gradient` will be called with; several may have the same name.
    options
        Passed to `hvd.grouped_allreduce`: `op`, `compression`, `process_set`, ...

    Raises
    ------
    ValueError
        The plan was made for other variables.
    """
    return _PlannedTape(tape, list(variables), _Averages(variables, options))


def planned_averages(gradients, variables, **options):
    """Gradients averaged over all ranks, one all-reduce for each group of the plan; None stays None.

    Parameters and errors as of `planned_tape`, and `gradients`: those of `variables`, in their order.
    """
    return _Averages(variables, options).of(list(gradients))


def planned_groups(variables):
    """The plan as `groups=` of Horovod's own `DistributedGradientTape` and Keras `DistributedOptimizer`.

    There Horovod identifies variables by name and would drop a gradient if two have the same name, so that is a `ValueError` here;
    `planned_tape` has no such limit.
    """
    _report_used()
    names = [variable.name for variable in variables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two variables are named {twice[0]!r}, which Horovod's groups= cannot tell apart; use planned_tape")
    return [[variables[i] for i in group] for group in _indices(variables)]


class _PlannedTape:
    def __init__(self, tape, variables, averages):
        self._tape = tape
        self._variables = variables
        self._averages = averages

    def __enter__(self):
        self._tape.__enter__()
        return self

    def __exit__(self, *error):
        return self._tape.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._tape, name)

    def gradient(self, target, sources, *args, **kwargs):
        """As `tf.GradientTape.gradient`, reduced. Gradients outside the plan go alone; sparse ones then stay sparse."""
        sources = list(sources)
        if [source.ref() for source in sources] != [variable.ref() for variable in self._variables]:
            raise ValueError("gradient() must be called with the variables that planned_tape was given, in the same order")
        return self._averages.of(list(self._tape.gradient(target, sources, *args, **kwargs)))


class _Averages:
    def __init__(self, variables, options):
        _report_used()
        self._variables = list(variables)
        self._groups = _indices(self._variables)
        self._options = options
        if _plan().get("compression") == "fp16":
            import horovod.tensorflow as hvd

            options.setdefault("compression", hvd.Compression.fp16)

    def of(self, gradients):
        """The gradients of the variables, averaged over all ranks."""
        import horovod.tensorflow as hvd
        import tensorflow as tf

        reduced = list(gradients)
        if hvd.size() == 1:
            return reduced
        grouped = {i for group in self._groups for i in group}
        for i in grouped:
            if gradients[i] is not None:
                gradients[i] = tf.convert_to_tensor(gradients[i])
        _check_sizes([[self._variables[i] for i in group] for group in self._groups])
        alone = [[i] for i in range(len(gradients)) if i not in grouped]
        for number, group in enumerate(self._groups + alone):
            present = [i for i in group if gradients[i] is not None]
            if present:
                name = f"planned_group_{number}"
                members = hvd.grouped_allreduce([gradients[i] for i in present], name=name, **self._options)
                for i, member in zip(present, members):
                    reduced[i] = member
        return reduced


def _check_sizes(groups):
    """Horovod splits a group above the threshold without an error, and merges groups without HOROVOD_DISABLE_GROUP_FUSION."""
    if not groups:
        return
    threshold = int(os.environ.get("HOROVOD_FUSION_THRESHOLD", 128 * 2**20))
    largest = max(
        [sum(v.dtype.size * (v.shape.num_elements() or 0) for v in group) for group in groups if len(group) > 1], default=0
    )
    if largest > threshold:
        raise ValueError(f"HOROVOD_FUSION_THRESHOLD={threshold} would split a group of the plan; set it to {largest} or more")
    if os.environ.get("HOROVOD_DISABLE_GROUP_FUSION") != "1":
        raise ValueError("Horovod would merge the groups of the plan; set the variables of horovod.env, on every rank")


def _indices(variables):
    """Positions of each group's variables; tensors are named `<variable>#<position>`."""
    groups = _plan()["groups"]
    position = {f"{variable.name.rsplit(':', 1)[0]}#{i}": i for i, variable in enumerate(variables)}
    unknown = [name for group in groups for name in group if name not in position]
    if unknown:
        raise ValueError(
            f"{_PLAN}: the plan was made for another model: no variable is {unknown[0]!r} among the {len(position)} given, "
            f"which begin with {next(iter(position), None)!r}"
        )
    return [[position[name] for name in group] for group in groups]


def _plan():
    return json.loads(_PLAN.read_text())


def _report_used():
    """Let `dpro-search validate` know that the script follows the plan."""
    folder = os.environ.get("DPRO_SEARCH_REPORT")
    if folder:
        Path(folder, "used-" + Path(__file__).name).touch()
