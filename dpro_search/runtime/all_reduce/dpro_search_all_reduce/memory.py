"""Kinds of memory, and the additions in them: `HostMemory` (NumPy), `TorchMemory`, `DeviceMemory`; `Registry` knows each tensor's.

Additions are apart from the transport: a memory gives its parts as buffers that MPI can send and receive, scratch memory of its
own kind, and adds one to the other. On a device the additions are kernels of the device, and nothing passes through the host if the
MPI library is device-aware. MPI knows nothing of a device's streams: before it reads or writes memory, `ready` waits for kernels.
"""

import collections

import numpy as np

try:  # of one float and its neighbours only; without it bfloat16 needs torch tensors
    import ml_dtypes

    _BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
except ImportError:
    _BFLOAT16 = None

_SIXTEEN_BITS = ("float16", "bfloat16")


class HostMemory:
    """A contiguous NumPy array, seen as one row of elements.

    Attributes
    ----------
    count, dtype
        Elements, and the name of their type.
    narrow
        Whether elements are 16-bit floats, which are summed in 32 bits.
    on_device
        Whether MPI reads and writes memory of a device.
    native
        The MPI library's all-reduce and what it sums in place, by the algorithm asked for, where it has summed all of this.
    """

    on_device = False

    def __init__(self, array):
        self.native = {}
        self._row = array.reshape(-1)
        self.count, self.dtype, self.itemsize = self._row.size, array.dtype.name, array.dtype.itemsize
        self.narrow = self.dtype in _SIXTEEN_BITS
        self._bytes = self._row.view(np.uint8)

    def buffer(self, start, stop):
        """Elements as what MPI sends or receives, without a copy."""
        return self._bytes[start * self.itemsize : stop * self.itemsize]

    def scratch(self, count):
        """Memory of the same kind for so many elements."""
        return HostMemory(np.empty(count, self._row.dtype))

    def ready(self):
        """Wait until additions that were begun have been made, so that MPI may read and write this memory and its scratch."""

    def add(self, start, stop, other, at):
        """Add elements of another memory from `at` on to those from `start` to `stop`."""
        part = self._row[start:stop]
        np.add(part, other._row[at : at + stop - start], out=part)

    def put_sum(self, start, stop, others):
        """Put the sum of several places, (memory, from which element), in the order given; 16-bit floats are rounded once."""
        part, length = self._row[start:stop], stop - start
        rows = [memory._row[at : at + length] for memory, at in others]
        if self.narrow:
            total = rows[0].astype(np.float32)
            for row in rows[1:]:
                total += row.astype(np.float32)
            part[:] = total.astype(self._row.dtype)
            return
        total = rows[0] + rows[1] if len(rows) > 1 else rows[0]
        for row in rows[2:]:
            total += row
        part[:] = total

    def divide(self, number):
        """Divide all by a number; integers are divided down."""
        if np.issubdtype(self._row.dtype, np.integer):
            np.floor_divide(self._row, number, out=self._row)
        else:
            np.divide(self._row, self._row.dtype.type(number), out=self._row)


class TorchMemory:
    """A contiguous torch tensor on the host, whose messages are NumPy views; attributes and methods are those of `HostMemory`."""

    on_device = False

    def __init__(self, tensor):
        self.native = {}
        self._row = tensor.detach().reshape(-1)
        self.count, self.dtype, self.itemsize = self._row.numel(), str(tensor.dtype).split(".")[1], tensor.element_size()
        self.narrow = self.dtype in _SIXTEEN_BITS
        self._bytes = _torch().Tensor.view(self._row, _torch().uint8)
        if self._row.device.type == "cpu":
            self._bytes = self._bytes.numpy()

    def buffer(self, start, stop):
        return self._bytes[start * self.itemsize : stop * self.itemsize]

    def scratch(self, count):
        return type(self)(_torch().empty(count, dtype=self._row.dtype, device=self._row.device))

    def ready(self):
        pass

    def add(self, start, stop, other, at):
        self._row[start:stop].add_(other._row[at : at + stop - start])

    def put_sum(self, start, stop, others):
        length = stop - start
        rows = [memory._row[at : at + length] for memory, at in others]
        total = rows[0].float() if self.narrow else rows[0].clone()
        for row in rows[1:]:
            total.add_(row)
        self._row[start:stop].copy_(total)

    def divide(self, number):
        if self._row.is_floating_point() or self._row.is_complex():
            self._row.div_(number)
        else:
            self._row.div_(number, rounding_mode="floor")


class DeviceMemory(TorchMemory):
    """A contiguous torch tensor on a device, for a device-aware MPI library, which takes its messages as DLPack objects."""

    on_device = True

    def __init__(self, tensor):
        super().__init__(tensor)
        self._device = _torch().get_device_module(self._row.device)
        self._pending = True

    def begin(self):
        """Count on kernels that still compute what is to be summed."""
        self._pending = True

    def ready(self):
        if self._pending:
            self._device.current_stream(self._row.device).synchronize()
            self._pending = False

    def add(self, start, stop, other, at):
        super().add(start, stop, other, at)
        self._pending = True

    def put_sum(self, start, stop, others):
        super().put_sum(start, stop, others)
        self._pending = True


class StagedMemory:
    """A tensor on a device whose messages pass through the host, for an MPI library that knows no devices.

    The tensor is copied to the host, into memory that the device can write to at full speed (pinned), summed there, and copied back
    by `finish`.
    """

    on_device = False

    def __init__(self, tensor):
        self.native = {}
        self._tensor = tensor.detach()
        self._host = TorchMemory(_torch().empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda))
        self._row = self._host._row  # which sums of several memories read
        for name in ("count", "dtype", "itemsize", "narrow", "buffer", "scratch", "ready", "add", "put_sum", "divide"):
            setattr(self, name, getattr(self._host, name))

    def begin(self):
        """Fetch the tensor."""
        self._host._row.copy_(self._tensor.reshape(-1))

    def finish(self):
        """Put the sum where the tensor is."""
        self._tensor.reshape(-1).copy_(self._host._row)


class Registry:
    """Memories by where they are, so that a buffer is asked once what it is.

    What "pointer cache" is called in Awan et al., "Scalable Distributed DNN Training using TensorFlow and CUDA-Aware MPI" (2019):
    frameworks sum the same buffers step after step. The last `most` buffers are kept, and held in memory so long.

    Parameters
    ----------
    device_aware
        Whether the MPI library sends from and receives into the memory of devices.
    """

    def __init__(self, device_aware=False, most=256):
        self._device_aware, self._most = device_aware, most
        self._known = collections.OrderedDict()
        self._arrays = {}  # By the identity of an array, which costs less to ask for than where it is.
        self.asked = 0  # Buffers that were not known.

    def memory(self, buffer):
        """The memory of an array or tensor.

        Raises
        ------
        TypeError
            It is neither a NumPy array nor a torch tensor, or has elements that cannot be added.
        ValueError
            It is not contiguous.
        """
        array = self._arrays.get(id(buffer))
        if array is not None and array[0] is buffer and array[2] is buffer.dtype and array[1].count == buffer.size:
            if buffer.flags.c_contiguous:
                return array[1]
        if isinstance(buffer, np.ndarray):
            key = buffer.ctypes.data, buffer.size, buffer.dtype.num
        elif hasattr(buffer, "data_ptr"):
            key = buffer.data_ptr(), buffer.numel(), buffer.dtype
        else:
            raise TypeError("an all-reduce takes a NumPy array or a torch tensor, not %s" % type(buffer).__name__)
        memory = self._known.get(key)
        if memory is None or not _contiguous(buffer):
            memory = self._asked(buffer)
            self._known[key] = memory
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        if isinstance(buffer, np.ndarray):
            if len(self._arrays) >= self._most:
                self._arrays.clear()
            self._arrays[id(buffer)] = buffer, memory, buffer.dtype
        return memory

    def forget(self):
        """Let go of all buffers."""
        self._known.clear()
        self._arrays.clear()

    def _asked(self, buffer):
        self.asked += 1
        if not _contiguous(buffer):
            raise ValueError("an all-reduce needs contiguous memory: this %s has strides; sum a copy of it" % type(buffer).__name__)
        if isinstance(buffer, np.ndarray):
            if buffer.dtype.kind not in "iufc" and buffer.dtype != _BFLOAT16:
                raise TypeError("an all-reduce takes numbers, not %s" % buffer.dtype)
            if not buffer.flags.writeable:
                raise ValueError("an all-reduce needs memory that it may change: this array is read-only")
            return HostMemory(buffer)
        if str(buffer.dtype) == "torch.bool" or buffer.is_sparse:
            raise TypeError("an all-reduce takes dense numbers, not %s" % (buffer.layout if buffer.is_sparse else buffer.dtype))
        if buffer.device.type == "cpu":
            return TorchMemory(buffer)
        return DeviceMemory(buffer) if self._device_aware else StagedMemory(buffer)


def _contiguous(buffer):
    return buffer.flags.c_contiguous if isinstance(buffer, np.ndarray) else buffer.is_contiguous()


def _torch():
    import torch

    return torch
