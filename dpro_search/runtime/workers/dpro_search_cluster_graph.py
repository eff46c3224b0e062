"""The training step of a model as a flat graph with the value of every tensor, and functions of parts of it.

Runs inside the measuring process (TensorFlow and the standard library only).
"""

import math

import tensorflow as tf
from dpro_search_cluster_draw import StepDag
from tensorflow.python.framework import op_def_registry

SHAPE_OPS = ("Const", "Shape", "ShapeN", "Size", "Rank")  # known before the step runs
# Not computation, or computation that a cluster cannot hold: what feeds it and what orders it.
OUTSIDE_OPS = frozenset(["Placeholder", "_Arg", "_Retval", "NoOp", "Assert", "Print", "PrintV2", "VarHandleOp", "PartitionedCall",
                         "StatefulPartitionedCall", "StatelessIf", "If", "While", "StatelessWhile"])  # fmt: skip
PASSING_OPS = frozenset(["Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot"])  # output k is input k
HEAVY_OPS = frozenset(["Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "DepthwiseConv2dNative", "MatMul", "BatchMatMul",
                       "DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter", "BatchMatMulV2",
                       "Einsum"])  # fmt: skip
# Attributes that do not decide an op's work: names, seeds, and the number of its inputs, which the wiring has.
UNTOLD = frozenset(["N", "num_args", "container", "shared_name", "debug_name", "allowed_devices", "message", "seed", "seed2"])
LARGEST_CONSTANT = 64  # elements of a shape or a permutation; a larger result of SHAPE_OPS is a tensor like others
MOST_TOLD = 8  # elements of a constant that are written down


class StepGraph:
    """One training step: forward, backward and optimizer.

    Attributes
    ----------
    nodes : list of NodeDef, in topological order
    values : dict
        Concrete value of every tensor ("node:0") of one step; variables' handles for resources.
    constants : set of str
        Tensors that depend on shapes only, and are constants to a compiler.
    """

    def __init__(self, model, batch):
        inputs, labels = batch
        variables = model.trainable_variables
        optimizer = tf.keras.optimizers.Adam(1e-4) if len(inputs.shape) < 4 else tf.keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(variables)
        loss_of = tf.keras.losses.SparseCategoricalCrossentropy()

        @tf.function
        def step(inputs, labels):
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(inputs, training=True))
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables))
            return loss

        function = step.get_concrete_function(inputs, labels)
        self._keep = (model, optimizer)
        self._function, self._arguments = function, [inputs, labels]
        graph = function.graph
        definitions = {node.name: node for node in graph.as_graph_def().node}
        ordered = _sorted(graph.get_operations())
        self.nodes = _without_passing([_plain(definitions[op.name]) for op in ordered])
        self.index = {node.name: i for i, node in enumerate(self.nodes)}
        self.values = self._run(function, self._arguments)
        self.inputs = [[_tensor(entry) for entry in node.input if not entry.startswith("^")] for node in self.nodes]
        self.outputs = [[tensor.name for tensor in op.outputs] for op in ordered]
        self.constants = self._shape_only()
        self.consumers = {}
        for i, names in enumerate(self.inputs):
            for name in names:
                self.consumers.setdefault(name, []).append(i)

    def run(self):
        """One training step, as the model runs it."""
        return self._function(*self._arguments)

    def _run(self, function, arguments):
        graph = function.graph
        placeholders = {t.name: v for t, v in zip(graph.inputs, arguments + [outer for outer, _ in graph.captures])}
        fetched = [
            tensor
            for op in graph.get_operations()
            for tensor in op.outputs
            if tensor.dtype not in (tf.resource, tf.variant, tf.string) and tensor.name not in placeholders
        ]
        definition = graph.as_graph_def()

        def whole(*values):
            fed = dict(zip(placeholders, values))
            return tf.import_graph_def(definition, input_map=fed, return_elements=[t.name for t in fetched], name="")

        outer = list(placeholders.values())
        values = tf.compat.v1.wrap_function(whole, [tf.TensorSpec(value.shape, value.dtype) for value in outer])(*outer)
        return {**placeholders, **{tensor.name: value for tensor, value in zip(fetched, values)}}

    def _shape_only(self):
        by_shape_only = set()
        for node, inputs, outputs in zip(self.nodes, self.inputs, self.outputs):
            by_shape = node.op in SHAPE_OPS
            if by_shape or (inputs and all(name in by_shape_only for name in inputs)):
                values = [self.values.get(name) for name in outputs]
                if all(v is not None and v.shape.num_elements() <= LARGEST_CONSTANT for v in values):
                    by_shape_only.update(outputs)
        return by_shape_only

    def dag(self, unsupported):
        """The graph as `StepDag`; ops of the `unsupported` types are left out of clusters."""
        eligible = [
            node.op not in OUTSIDE_OPS
            and node.op not in unsupported
            and node.op not in PASSING_OPS
            and bool(outputs or node.op.endswith("VariableOp"))
            # What is read before the step changes it is an input; what is read back after that is part of the update.
            and (node.op != "ReadVariableOp" or any(entry.startswith("^") for entry in node.input))
            and not (outputs and all(name in self.constants for name in outputs))
            and all(name in self.values for name in outputs + inputs)
            for node, inputs, outputs in zip(self.nodes, self.inputs, self.outputs)
        ]
        neighbours = [set() for _ in self.nodes]
        for name, users in self.consumers.items():
            if name in self.constants:
                continue
            sharing = [*users, self.index[name.partition(":")[0]]]
            # A tensor that everyone reads (the learning rate) makes nobody neighbours but its producer's.
            pairs = [(a, b) for a in sharing for b in sharing] if len(sharing) <= 8 else [(sharing[-1], b) for b in users]
            for a, b in pairs:
                if a != b and eligible[a] and eligible[b]:
                    neighbours[a].add(b)
                    neighbours[b].add(a)
        predecessors = [[self.index[_node(entry)] for entry in node.input] for node in self.nodes]
        return StepDag(predecessors, neighbours, eligible, [node.op in HEAVY_OPS for node in self.nodes])

    def describe(self, members):
        """(ops, tensors) of a cluster: ops as [type, inputs, outputs, attributes], tensors as [dtype, shape, role, elements].

        A role is "in" (made outside), "const", "variable" (read or written in place), "out" (needed outside, or by nobody at
        all) or "inner". Elements are those of a small constant.
        """
        inside, numbers, tensors, ops = set(members), {}, [], []

        def number(name, role):
            if name not in numbers:
                numbers[name] = len(tensors)
                value = self.values[name]
                if value.dtype == tf.resource:
                    value, role = variable_behind(value), "variable"
                elements = _elements(value) if role == "const" else []
                tensors.append([tf.as_dtype(value.dtype).name, tf.TensorShape(value.shape).as_list(), role, elements])
            return numbers[name]

        for i in members:
            made = [number(name, "out" if self._leaves(name, inside) else "inner") for name in self.outputs[i]]
            ops.append([i, made])
        for op in ops:
            i = op[0]
            used = [number(name, "const" if name in self.constants else "in") for name in self.inputs[i]]
            op[:] = [self.nodes[i].op, used, op[1], _attributes(self.nodes[i])]
        return ops, tensors

    def _leaves(self, name, inside):
        users = self.consumers.get(name, [])
        return not users or any(user not in inside for user in users)

    def part(self, members):
        """(GraphDef, names of the fed tensors, names of the wanted tensors, names of wanted nodes) of a cluster."""
        inside, definition = set(members), tf.compat.v1.GraphDef()
        names = {self.nodes[i].name for i in members}
        fed, constants = {}, {}
        for i in members:
            node = definition.node.add()
            node.CopyFrom(self.nodes[i])
            del node.input[:]
            for entry in self.nodes[i].input:
                if entry.startswith("^"):
                    if entry[1:] in names:
                        node.input.append(entry)
                    continue
                tensor = _tensor(entry)
                if _node(entry) in names:
                    node.input.append(entry)
                elif tensor in self.constants:
                    node.input.append(constants.setdefault(tensor, f"constant_{len(constants)}"))
                else:
                    node.input.append(fed.setdefault(tensor, f"input_{len(fed)}"))
        for tensor, name in constants.items():
            value = self.values[tensor]
            node = definition.node.add(name=name, op="Const")
            node.attr["dtype"].type = value.dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
        for tensor, name in fed.items():
            node = definition.node.add(name=name, op="Placeholder")
            node.attr["dtype"].type = self.values[tensor].dtype.as_datatype_enum
        results = [name for i in members for name in self.outputs[i] if self._leaves(name, inside)]
        effects = [self.nodes[i].name for i in members if not self.outputs[i]]
        return definition, fed, results, effects


def _attributes(node):
    """Attributes that decide an op's work beside its shapes, as strings; defaults and those that are all ones are left out."""
    definition = op_def_registry.get(node.op)
    usual = {attr.name: attr.default_value for attr in definition.attr} if definition else {}
    texts = {}
    for name, value in node.attr.items():
        if name not in UNTOLD and not name.startswith("_") and value != usual.get(name):
            text = _text(value)
            if text:
                texts[name] = text
    return texts


def _text(value):
    """An attribute's value; empty for a type, a shape or a function."""
    kind = value.WhichOneof("value")
    if kind == "list":
        numbers = [*value.list.i, *map(int, value.list.b)] + ["%g" % number for number in value.list.f]
        strings = [text.decode(errors="replace") for text in value.list.s]
        return "x".join(map(str, numbers)) if any(number != 1 for number in numbers) else ",".join(strings)
    if kind == "s":
        return value.s.decode(errors="replace")
    if kind in ("i", "b"):
        return str(int(getattr(value, kind)))
    return "%g" % value.f if kind == "f" else ""


def _elements(value):
    """Elements of a small constant; none of a larger one, and none where one is not a finite number."""
    if value.shape.num_elements() > MOST_TOLD or not (value.dtype.is_integer or value.dtype.is_floating or value.dtype.is_bool):
        return []
    elements = value.numpy().ravel().tolist()
    if not all(math.isfinite(element) for element in elements):
        return []
    return [float(element) if value.dtype.is_floating else int(element) for element in elements]


def variable_behind(handle):
    """Type and shape of the variable that a handle names: with `dtype` and `shape`."""
    return handle._handle_data.shape_and_type[0]


def _sorted(operations):
    """Operations in topological order (TensorFlow's creation order is one, but for added control inputs)."""
    state, order = {}, []
    for start in operations:
        stack = [start]
        while stack:
            op = stack[-1]
            if state.get(op) == 2:
                stack.pop()
                continue
            sources = [tensor.op for tensor in op.inputs] + list(op.control_inputs)
            left = [source for source in sources if state.get(source) != 2]
            if state.get(op) == 1 or not left:
                state[op] = 2
                order.append(op)
                stack.pop()
            else:
                state[op] = 1
                stack.extend(left)
    return order


def _plain(node):
    """A node as the compiler takes it: a sum of two inputs as AddV2, without device or placement."""
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    copy.device = ""
    if "_class" in copy.attr:
        del copy.attr["_class"]
    if copy.op == "AddN" and copy.attr["N"].i == 2:
        copy.op = "AddV2"
        del copy.attr["N"]
    return copy


def _without_passing(nodes):
    """Nodes that take their data from where it is made; those that only passed it on stay, with nobody behind them."""
    source = {}
    for node in nodes:
        for k, entry in enumerate(node.input):
            if not entry.startswith("^"):
                node.input[k] = source.get(_tensor(entry), entry)
        if node.op in PASSING_OPS:
            data = [entry for entry in node.input if not entry.startswith("^")]
            source.update(("%s:%d" % (node.name, k), entry) for k, entry in enumerate(data))
    return nodes


def _node(entry):
    return entry[1:] if entry.startswith("^") else entry.partition(":")[0]


def _tensor(entry):
    return entry if ":" in entry else entry + ":0"
