"""The parts of PyTorch that are not public and that the capture of a step needs, in one place.

`TESTED` is the range of versions in which all of them were tried; outside of it the capture warns and goes on.
"""

import torch

TESTED = ((2, 13), (2, 13))


def version():
    """(major, minor) of the PyTorch that runs."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def version_warning():
    """A warning about the version of PyTorch; empty: none."""
    low, high = TESTED
    if low <= version() <= high:
        return ""
    tested = ".".join(map(str, low)) + ("" if low == high else " to " + ".".join(map(str, high)))
    return "capture was tested with PyTorch %s, this is %s: check the result" % (tested, torch.__version__)


def fake_mode():
    """Tensors without data; those that are made outside of it may be used inside."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def needs_values(error):
    """Whether an error says that an op needs the values of a tensor, which a tensor without data does not have."""
    from torch._subclasses import fake_tensor

    names = ("DataDependentOutputException", "DynamicOutputShapeException")
    kinds = tuple(getattr(fake_tensor, name) for name in names if hasattr(fake_tensor, name))
    text = str(error)
    return isinstance(error, kinds) or "meta tensor" in text or "data-dependent" in text or "DataDependent" in text


def start_fake_group(ranks, rank=0):
    """This process becomes one of so many ranks; nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def shapes_are_known(schedule, stages):
    """Have a pipeline's stages take the shapes that they were given, for there is nobody to agree on them with."""
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
    schedule._warmup_p2p = lambda *args, **kwargs: None


def inner_mesh(mesh, axis, ranks):
    """(outer, inner): an axis of a mesh as so many groups of neighbouring ranks, and these."""
    outer = mesh.size() // ranks
    split = mesh._unflatten(0, (outer, ranks), ("%s_mod_ep" % axis, "ep"))
    return split["%s_mod_ep" % axis], split["ep"]


def joined_mesh(mesh, names):
    """The axes of a mesh as one."""
    return mesh[names]._flatten("_".join(names)) if len(names) > 1 else mesh[names[0]]


def rotate_by(method):
    """Let context parallel ranks pass keys and values on by a method: allgather or alltoall."""
    from torch.distributed.tensor.experimental import _attention

    _attention.set_rotate_method(method)


def flash_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """`scaled_dot_product_attention` by the op for which context parallel has a ring, whatever the device has kernels for.

    Like CUDA's kernel it takes fewer heads of keys and values than of queries.
    """
    if attn_mask is not None:
        raise ValueError("context parallel attention takes no mask")
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]


def next_sequence():
    """The number that the next node of the autograd graph gets."""
    return torch._C._autograd._get_sequence_nr()


def backward_sequence():
    """The number of the node whose backward pass runs; None outside a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def peer_of(func, args):
    """Number, within the group, of the rank that a message goes to or comes from."""
    names = [argument.name for argument in func._schema.arguments]
    return int(args[next(place for place, name in enumerate(names) if name in ("dst", "src"))])


def group_ranks(args):
    """Ranks of the process group among an op's arguments; None without one."""
    import torch.distributed as dist

    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.get_process_group_ranks(dist.ProcessGroup.unbox(value))
            except (RuntimeError, TypeError, ValueError):  # a reduction
                continue
        if isinstance(value, dist.ProcessGroup):
            return dist.get_process_group_ranks(value)
        if isinstance(value, str):
            try:
                return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(value))
            except (RuntimeError, ValueError, KeyError):  # the name of a reduction
                continue
    return None


def flops_of(func, args, kwargs, result):
    """FLOPs of an op as `torch.utils.flop_counter.FlopCounterMode` counts them; 0 for one that it does not count.

    It does not count the fused attention of CPUs, which stands for that of the job's devices: here it counts as theirs do, with
    what a causal mask leaves out.
    """
    from torch.utils import flop_counter

    name = func._overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return int(flop_counter.sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return int(flop_counter.sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape))
    counted = flop_counter.flop_registry.get(func._overloadpacket)
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=result))


def bucket_assignment(tensors, cap_bytes, first_bytes):
    """Indices of the gradients in each bucket of DistributedDataParallel, which counts in the order that is given."""
    import torch.distributed as dist

    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [first_bytes, cap_bytes], [False] * len(tensors))
    return buckets
