"""`GraphRecorder`: every op and collective of a training step, with the module that it belongs to, its tensors, FLOPs and bytes.

Storages stand for tensors, so that a view is the tensor that it looks at. Ops that only make views are not recorded.
"""

import weakref

import dpro_search_capture_torch as private
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FORWARD, BACKWARD, OPTIMIZER = range(3)

# Names of c10d's and the functional collectives' ops, without underscores at both ends.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}
_IGNORED = ("prim", "profiler")
_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "cplib")
_GATHERED = ("split_with_sizes_copy", "all_gather_copy_in")  # FSDP's parameters between all-gather and use


class GraphRecorder(TorchDispatchMode):
    """Ops while it is on, and the storages that are alive.

    Attributes
    ----------
    ops
        A list for each: name, phase, module, inputs and outputs as [tensor, shape, dtype], FLOPs, bytes read, bytes written,
        the op of the forward pass that it differentiates (-1: none), arguments beside tensors.
    collectives
        A dictionary for each.
    saved
        Tensors that the backward pass needs, with the op that needs them.
    held_bytes
        Most bytes of all storages that were alive at the end of a forward pass.
    peak_bytes
        Most bytes of all storages that were alive at a time.
    """

    def __init__(self, names):
        super().__init__()
        self.phase = FORWARD
        self.ops, self.collectives, self.saved = [], [], []
        self.parameters = set()  # storages of parameters, and of what is computed from parameters alone
        self.modules = [""]
        self.live_bytes = self.peak_bytes = self.held_bytes = 0
        self.peak_phase = FORWARD
        self._names, self._stack = names, []
        self._numbers = {}  # of storages that are alive
        self._sizes = {}
        self._next = 0
        self._producers = {}  # sequence number of a node of the autograd graph: the op that made it
        self._last_sequence = private.next_sequence()
        self._last_producer = -1
        self._messages = {}  # storages that stages of a pipeline send: the phase that they are of
        self.recording = True

    # Passes.

    def begin_forward(self):
        """A forward pass, or the first part of one, follows."""
        self.phase = FORWARD
        self._last_sequence = private.next_sequence()

    def begin_backward(self):
        """A backward pass follows."""
        self.phase = BACKWARD

    def expect(self, messages, forward):
        """Note the pass of the messages that a stage will send or receive (`P2POp`)."""
        for each in messages:
            self._messages[self.number(_local(each.tensor))] = FORWARD if forward else BACKWARD

    # Modules.

    def entered(self, module, _inputs):
        """Hook before a module's forward pass."""
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))

    def left(self, _module, _inputs, _output):
        """Hook behind it."""
        if self._stack:
            self._stack.pop()

    # Storages.

    def number(self, tensor):
        """The number of a tensor's storage; a new number for a storage that was not seen before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._next
            self._next += 1
            size = storage.nbytes()
            self._sizes[number] = size
            self._grew(size)
            weakref.finalize(storage, self._freed, key, number).atexit = False
        return number

    def resized(self, storage, size):
        """A storage is resized, as FSDP does to free and to allocate."""
        number = self._numbers.get(storage._cdata)
        if number is not None:
            self._grew(size - self._sizes[number])
            self._sizes[number] = size

    def _grew(self, size):
        self.live_bytes += size
        if self.recording and self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_phase = self.live_bytes, self.phase

    def _freed(self, key, number):
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self.live_bytes -= self._sizes.pop(number, 0)

    # Ops.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented  # it becomes ops on local tensors, and collectives
        result = func(*args, **kwargs)
        namespace, _, name = func._schema.name.partition("::")
        if namespace not in _IGNORED:
            self._seen(func, namespace, name, args, kwargs, result)
        return result

    def _seen(self, func, namespace, name, args, kwargs, result):
        inputs = [tensor for tensor in _flat((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        outputs = [tensor for tensor in _flat(result) if isinstance(tensor, torch.Tensor)]
        read, made = [self.number(tensor) for tensor in inputs], [self.number(tensor) for tensor in outputs]
        if namespace in _COMMUNICATION:
            self._communicated(func, name.strip("_"), args, inputs, outputs)
        mutable = func._schema.is_mutable
        is_view = not mutable and namespace == "aten" and outputs and set(made) <= set(read)
        number = len(self.ops) - 1 if is_view else len(self.ops)
        forward = self._forward_op(number)
        written = outputs
        if mutable:
            written = [
                tensor
                for argument, value in zip(func._schema.arguments, args)
                if argument.alias_info is not None and argument.alias_info.is_write
                for tensor in _flat(value)
                if isinstance(tensor, torch.Tensor)
            ] or outputs
        if (read and set(read) <= self.parameters) or any(part in name for part in _GATHERED):
            self.parameters.update(self.number(tensor) for tensor in written)
        if is_view or not self.recording or name == "detach":
            return
        self.ops.append(
            [
                "%s::%s" % (namespace, name),
                self.phase,
                self._module(forward),
                [self._value(tensor) for tensor in inputs],
                [self._value(tensor) for tensor in written],
                private.flops_of(func, args, kwargs, result),
                sum(_bytes(tensor) for tensor in inputs),
                sum(_bytes(tensor) for tensor in written),
                forward,
                _attributes(func, name, args, kwargs),
            ]
        )

    def _value(self, tensor):
        return [self.number(tensor), list(tensor.shape), str(tensor.dtype).replace("torch.", "")]

    def _forward_op(self, number):
        """The op whose backward pass runs; in the forward pass, note which nodes an op made."""
        sequence = private.backward_sequence()
        if self.phase == FORWARD:
            following = private.next_sequence()
            for each in range(self._last_sequence, following):
                self._producers[each] = number
            self._last_sequence = following
            return -1
        if sequence is None or self.phase != BACKWARD:
            return -1
        producer = self._producers.get(sequence)
        if producer is not None:
            self._last_producer = producer
        return self._last_producer  # nodes of other threads, and of accumulated gradients, follow the one that they belong to

    def _module(self, forward):
        if self._stack:
            return self._stack[-1]
        return self.ops[forward][2] if forward >= 0 else ""

    def _communicated(self, func, name, args, inputs, outputs):
        if name in ("wait_tensor", "wrap_tensor_autograd", "barrier", "monitored_barrier"):
            return
        if name.startswith("flex_cp_allgather"):
            kind = "reduce_scatter" if name.endswith("backward") else "all_gather"
            for tensor in inputs[:2] if kind == "reduce_scatter" else outputs:
                self.collective(kind, tensor.numel(), tensor, private.group_ranks(args))
            return
        kind = _COLLECTIVES.get(name)
        if kind is None:
            raise NotImplementedError("the collective %s is not known to the capture" % name)
        if kind in ("send", "recv"):
            (tensor,) = inputs
            ranks = private.group_ranks(args)
            ends = [torch.distributed.get_rank(), ranks[private.peer_of(func, args)]]
            phase = self._messages.get(self.number(tensor), self.phase)
            self.collective(kind, tensor.numel(), tensor, ends if kind == "send" else ends[::-1], phase)
            return
        largest = max(inputs + outputs, key=torch.Tensor.numel)
        elements = largest.numel()
        if kind == "all_reduce" and name.startswith("allreduce"):
            elements = sum(tensor.numel() for tensor in inputs)
        self.collective(kind, elements, largest, private.group_ranks(args))

    def collective(self, kind, elements, tensor, ranks, phase=None):
        """Note a collective; elements are those of the whole tensor of all ranks (all-gather, reduce-scatter) or of each rank's.

        Ranks of a message are its sender and its receiver.
        """
        if not self.recording or not ranks or len(ranks) < 2:
            return
        self.collectives.append(
            {
                "type": kind,
                "phase": self.phase if phase is None else phase,
                "module": self._stack[-1] if self._stack else self._module(self._last_producer if self.phase == BACKWARD else -1),
                "elements": elements,
                "bytes": elements * tensor.element_size(),
                "dtype": str(tensor.dtype).replace("torch.", ""),
                "ranks": list(ranks),
                "op": len(self.ops),
            }
        )

    def keep(self, tensor):
        """Hook for tensors that autograd saves."""
        local = _local(tensor)
        if self.recording and self.phase == FORWARD and type(local) is not torch.nn.Parameter:
            self.saved.append(
                [self.number(local), len(self.ops), local.untyped_storage().nbytes(), list(local.shape), str(local.dtype)[6:]]
            )
        return tensor

    def forward_ended(self):
        """Note what is kept of a forward pass, now that FSDP has freed the parameters that it gathered."""
        self.held_bytes = max(self.held_bytes, self.live_bytes)
        for each in self.saved:
            each[2] = self._sizes.get(each[0], each[2])

    def start(self):
        """Forget what was recorded so far; what is alive stays."""
        self.ops, self.collectives, self.saved = [], [], []
        self._producers, self._last_producer = {}, -1
        self._last_sequence = private.next_sequence()
        self.peak_bytes, self.held_bytes = self.live_bytes, 0


def _attributes(func, name, args, kwargs):
    """Arguments that decide how much an op computes, beside the shapes of its tensors."""
    if "scaled_dot_product" not in name and "convolution" not in name:
        return {}
    values = {argument.name: value for argument, value in zip(func._schema.arguments, args)}
    values.update(kwargs)
    return {key: values[key] for key in ("is_causal", "groups", "transposed") if key in values}


def _local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def _is_wrapper(kind):
    from torch.distributed.tensor import DTensor

    return issubclass(kind, DTensor)


def _bytes(tensor):
    """Bytes that reading or writing a tensor moves; those of the storage if the tensor is expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flat(value):
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _flat(each)
    else:
        yield value
