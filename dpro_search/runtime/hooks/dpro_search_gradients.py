"""Writes down, while TensorFlow traces the step, which variable's gradient each Horovod all-reduce carries.

Horovod names an all-reduce after the node that made the gradient, and otherwise once gradients are grouped; what stays the
same from run to run is the variable. `record_gradient_names` is called once, after `horovod.tensorflow` has been imported and
before the step is traced; `recorded` then returns a list that JSON can hold.
Standard library and the framework only; Python 3.8 and later.
"""

import functools

_LOOK_BACK = 64  # graph nodes to walk from an all-reduce to its gradient: casts, scaling and clipping lie between

_sources = {}  # Tensor.ref() of a gradient -> (its variable, index among the sources of its tape)
_records = {}  # by name in Horovod; a function that is traced twice makes the same names again


def record_gradient_names():
    """Patch TensorFlow's tape and Horovod's all-reduce; a second call does nothing."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    if hasattr(hvd._allreduce, "__wrapped__"):
        return
    tf.GradientTape.gradient = _noting_gradients(tf.GradientTape.gradient)
    hvd._make_subgraph = _noting_arguments(hvd._make_subgraph)
    hvd._allreduce = _noting_allreduce(hvd._allreduce)
    hvd._grouped_allreduce = _noting_grouped_allreduce(hvd._grouped_allreduce)


def recorded():
    """One entry for each gradient that is all-reduced, in the order in which the graph was built.

    Returns
    -------
    list of dict
        name: the gradient's lasting name, `tensor_name(variable, index)`; variable, index: "" and -1 where no tape is
        known to have made the tensor; shape: -1 for an unknown dimension, None for an unknown rank; dtype; op: name of the
        all-reduce in the graph that was traced (a node of the executed graph has this name, or ends in "/" and this name);
        horovod: the same for the tensor as Horovod's timeline knows it.
    """
    return list(_records.values())


def tensor_name(variable, index):
    """Name that is equal in every run and under every grouping; the index distinguishes variables of one name."""
    return "%s#%d" % (variable.rsplit(":", 1)[0], index)


def _noting_gradients(original):
    @functools.wraps(original)
    def gradient(self, target, sources, *args, **kwargs):
        import tensorflow as tf

        gradients = original(self, target, sources, *args, **kwargs)
        _note_sources(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return gradients

    return gradient


def _noting_arguments(original):
    """Optimizers reduce in a function of its own, called with (gradients, variables): inside, the gradients are arguments."""

    @functools.wraps(original)
    def make_subgraph(reduce):
        import tensorflow as tf

        @tf.autograph.experimental.do_not_convert
        def noting_reduce(grads, vars=None, *args, **kwargs):  # parameters' names end up in the graph: they stay Horovod's
            if vars is not None:
                _note_sources(grads, vars)
            return reduce(grads, vars, *args, **kwargs)

        return original(noting_reduce)

    return make_subgraph


def _note_sources(gradients, variables):
    for index, (gradient, variable) in enumerate(zip(gradients, variables)):
        for tensor in (gradient, getattr(gradient, "values", None)):  # the values of a sparse gradient
            if _in_graph(tensor):
                _sources[tensor.ref()] = (variable, index)


def _noting_allreduce(original):
    @functools.wraps(original)
    def allreduce(tensor, *args, **kwargs):
        reduced = original(tensor, *args, **kwargs)
        if _in_graph(reduced):
            _note(tensor, reduced.op.name, reduced.op.name)
        return reduced

    return allreduce


def _noting_grouped_allreduce(original):
    @functools.wraps(original)
    def grouped_allreduce(tensors, *args, **kwargs):
        reduced = original(tensors, *args, **kwargs)
        if reduced and _in_graph(reduced[0]):
            op = reduced[0].op.name
            for part, tensor in enumerate(tensors):
                _note(tensor, op, "%s_%dof%d" % (op, part + 1, len(tensors)))
        return reduced

    return grouped_allreduce


def _note(tensor, op, horovod):
    variable, index = _source_of(tensor)
    shape = tensor.shape if variable is None else variable.shape
    _records[horovod] = {
        "name": horovod if variable is None else tensor_name(variable.name, index),
        "variable": "" if variable is None else variable.name,
        "index": index,
        "shape": None if shape.rank is None else [-1 if n is None else int(n) for n in shape.as_list()],
        "dtype": tensor.dtype.name,
        "op": op,
        "horovod": horovod,
    }


def _source_of(tensor):
    """The nearest gradient upstream, through the branches and functions that the tensor was captured into."""
    front, seen = [tensor], set()
    while front and len(seen) < _LOOK_BACK:
        tensor = front.pop(0)
        if tensor.ref() in _sources:
            return _sources[tensor.ref()]
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        front += [outer for outer, inner in getattr(tensor.graph, "captures", ()) if inner is tensor and _in_graph(outer)]
        front += tensor.op.inputs
    return None, -1


def _in_graph(tensor):
    import tensorflow as tf

    return tf.is_symbolic_tensor(tensor) and not isinstance(tensor, tf.IndexedSlices)
