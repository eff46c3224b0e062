"""Collectives, element types, ops and calls of runtimes, from the names that libraries and profilers give: for readers only.

Everything behind the readers decides by the columns of a `Trace`, which are filled with this.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from dpro_search.collect.trace_columns import CollectiveKind, Role

_SEPARATORS = re.compile(r"[-_\s]")
# The first that is found counts: "all_gather" holds "gather", "reduce_scatter" holds "reduce". NCCL's kernel SendRecv also carries
# out all-to-alls, and a push-pull is two messages: neither identifies the collective.
_SPELLINGS: tuple[tuple[re.Pattern[str], CollectiveKind], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        ("sendrecv|pushpull", CollectiveKind.UNKNOWN),
        ("allreduce", CollectiveKind.ALL_REDUCE),
        ("allgather", CollectiveKind.ALL_GATHER),
        ("reducescatter", CollectiveKind.REDUCE_SCATTER),
        ("alltoall", CollectiveKind.ALL_TO_ALL),
        ("broadcast", CollectiveKind.BROADCAST),
        ("barrier", CollectiveKind.BARRIER),
        ("gather", CollectiveKind.GATHER),
        ("scatter", CollectiveKind.SCATTER),
        ("reduce", CollectiveKind.REDUCE),
        ("send", CollectiveKind.SEND),
        ("recv", CollectiveKind.RECV),
        ("push", CollectiveKind.PUSH),
        ("pull", CollectiveKind.PULL),
    )
)
# Kernels that move data between devices: pattern of the function's name, what it carries out, and where the names come from. A
# bare "AllReduce" is not among them, for kernels of norms and softmax have it in their template arguments (WarpAllReduce).
_COMMUNICATION_KERNELS: tuple[tuple[re.Pattern[str], CollectiveKind, str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind, source)
    for pattern, kind, source in (
        (r"nccl\w*Kernel", CollectiveKind.UNKNOWN, "NCCL and RCCL: src/device, generate.py; symmetric kernels of NCCL 2.27"),
        (r"msccl\w*Kernel", CollectiveKind.UNKNOWN, "MSCCL in RCCL: src/device/msccl_kernel_impl.h"),
        (r"mscclpp", CollectiveKind.UNKNOWN, "MSCCL++: src/ext/collectives"),
        (r"oneccl\w*|\bccl::\w+", CollectiveKind.UNKNOWN, "oneCCL: src/coll/algorithms"),
        (r"\bhcom_\w+|hccl\w*", CollectiveKind.UNKNOWN, "HCCL of Ascend: names of its tasks in the profiler's timeline"),
        (r"deep_ep::(?:\w+::)*\w*(?:dispatch|combine|barrier|notify|clean)(?!_layout)\w*", CollectiveKind.ALL_TO_ALL,
         "DeepEP: csrc/kernels/{intranode,internode,internode_ll}.cu; its layout kernels compute"),
        (r"hybrid_ep::(?:\w+::)*\w*(?:dispatch|combine|device_sync)\w*", CollectiveKind.ALL_TO_ALL, "HybridEP: csrc/hybrid_ep"),
        (r"pplx::(?:\w+::)*\w*(?:dispatch|combine)\w*", CollectiveKind.ALL_TO_ALL, "pplx-kernels: csrc/all_to_all"),
        (r"moe(?:A2A|AllToAll|_?all_?to_?all)\w*", CollectiveKind.ALL_TO_ALL, "TensorRT-LLM: moeCommKernels"),
        (r"nvshmem\w*|rocshmem\w*", CollectiveKind.UNKNOWN, "NVSHMEM: src/device/launch; rocSHMEM"),
        (r"c10d::symmetric_memory::\S*|multimem_\w+|(?:put|wait)_signal_kernel", CollectiveKind.UNKNOWN,
         "PyTorch: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu"),
        (r"(?:one|two)_?shot_?all_?(?:reduce|gather)\w*", CollectiveKind.UNKNOWN, "PyTorch, as above; TensorRT-LLM"),
        (r"cross_device_reduce\w*", CollectiveKind.ALL_REDUCE, "vLLM, SGLang, aiter: csrc/custom_all_reduce.cuh"),
        (r"allreduce_prototype_\w+|quick_?reduce::\S*", CollectiveKind.ALL_REDUCE, "vLLM: csrc/quickreduce"),
        (r"lamport_style\w*all_?reduce\w*|allreduce_fusion\w*", CollectiveKind.ALL_REDUCE, "TensorRT-LLM, FlashInfer"),
        (r"userbuffers_\w*_rs(?:_|\b)\w*", CollectiveKind.REDUCE_SCATTER, "Transformer Engine: userbuffers.cu"),
        (r"userbuffers_\w*_ag(?:_|\b)\w*", CollectiveKind.ALL_GATHER, "Transformer Engine, as above"),
        (r"userbuffers_push(?:send|recv)\w*|kuserbuffers_\w*", CollectiveKind.SEND, "Transformer Engine, as above"),
        (r"userbuffers_\w*", CollectiveKind.ALL_REDUCE, "Transformer Engine, as above"),
        (r"^Memcpy ?P(?:to|2)P", CollectiveKind.SEND, "CUPTI: CUPTI_ACTIVITY_MEMCPY_KIND_PTOP, a copy between two devices"),
    )
)  # fmt: skip
_KNOWN_TO_MOVE = re.compile("|".join(f"(?:{pattern.pattern})" for pattern, _, _ in _COMMUNICATION_KERNELS), re.IGNORECASE)
# One device writes to or reads from another without its taking part.
_ONE_SIDED = re.compile(r"^Memcpy ?P(?:to|2)P|shmem\w*(?:put|get|rma)", re.IGNORECASE)
_COMPUTES = re.compile(
    r"gemm|matmul|cutlass|cublas|xmma|conv|attn|attention|softmax|norm|fusion|fused|swiglu|silu|gelu|quant|embedding", re.IGNORECASE
)
_COLLECTIVE_WORD = re.compile(r"(?<!warp)(?<!block)_?all_?(?:reduce|gather|to_?all)|reduce_?scatter|send_?recv", re.IGNORECASE)
# PyTorch's compiler names its kernels after the ops around them, collectives among these.
_COMPILED_KERNEL = re.compile(r"^triton_(?:poi|red|per|tem|for)_")
_GENERAL_KERNEL = re.compile(r"^(?:void )?(?:at::|Mem(?:cpy|set)\b)", re.IGNORECASE)
# Ops of frameworks and libraries that do nothing but communicate.
_LIBRARY = re.compile(
    r"nccl|rccl|hccl|xccl|oneccl|mccl|cncl|ucc(?=:)|ucx(?=:)|gloo|mpi(?=:)|mscclpp|nvshmem|rocshmem|deep_ep|hybrid_ep|userbuffers",
    re.IGNORECASE,
)
_LIBRARY_SPAN = re.compile(r"^(?:nccl|rccl|hccl|xccl|oneccl|mccl|cncl|ucc|ucx|gloo|mpi):", re.IGNORECASE)
_COMMUNICATION_OP = re.compile(
    r"^(?:c10d::|_?c10d_functional::|record_param_comms$|symm_mem::|deep_ep|nvshmem"
    # A library's own op with the name of a collective (vLLM's _C_custom_ar::all_reduce); FSDP's of these names copy.
    r"|(?!aten::|prims::|fsdp::)\w+::_?(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)\w*$)"
)
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "byte": "uint8", "unsigned char": "uint8", "char": "int8",
    "signed char": "int8", "short": "int16", "int": "int32", "long": "int64", "long int": "int64", "long long": "int64",
    "complexfloat": "complex64", "complexdouble": "complex128", "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}  # fmt: skip
_DTYPES |= {name: name for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool")}
_DTYPES |= {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_FLOAT8 = re.compile(r"float8_e\dm\d(fn|fnuz|b11fnuz)?")

# Beginnings of names that PyTorch gives ops of the host, in profiles and in execution traces.
AUTOGRAD_FUNCTION = "autograd::engine::evaluate_function: "  # what the autograd engine runs of a backward pass, an op of its own
ENQUEUE = "c10d::"  # an op that enqueues a collective
GLOO_RUN = "gloo:"  # the execution of a collective by a thread of Gloo

# Calls of a device's runtime. CUDA's names are the pattern for HIP, MUSA (Moore Threads) and most others. CNRT (Cambricon) calls a
# stream a queue and an event a notifier; ACL (Ascend) puts the verb first; Unified Runtime, Level Zero and OpenCL have queues,
# command lists, fences and `Finish`.
# Vendors add these to the name of a call: `cudaStreamSynchronize_ptsz`, `aclrtSynchronizeStreamWithTimeout`.
_ENDING = r"(?:WithTimeout|WithFlags|WithBarrier|Ext)*(?:_\w+)?$"

# Calls in which the host waits for all streams of a device, for one stream, and for an event.
DEVICE_WAITS = re.compile(rf"(?:(?:Device|Ctx|Context)Sync(?:hronize)?|Sync(?:hronize)?(?:Device|Ctx|Context)){_ENDING}")
STREAM_WAITS = re.compile(
    rf"(?:(?:Stream|Queue|CommandList)(?:Host)?Sync(?:hronize)?|Sync(?:hronize)?(?:Stream|Queue)|QueueFinish|clFinish){_ENDING}"
)
EVENT_WAITS = re.compile(
    r"(?:(?:Event|Fence|Notifier)(?:Host)?Sync(?:hronize)?|Sync(?:hronize)?(?:Event|Notifier)"
    rf"|(?<!Queue)WaitNotifier|WaitForEvents|(?<!Enqueue)Events?Wait){_ENDING}"
)
# Calls that wait for the device before they copy or free memory.
MEMORY_WAITS = re.compile(r"^(?:cuda|hip|musa|aclrt|cnrt|mc)(?:Memcpy|Free)$")

# Calls that make a stream wait for an event, and that record one on a stream.
STREAM_ORDERS = re.compile(
    rf"(?:(?:Stream|Queue)Wait(?:Event|Notifier)|EnqueueEventsWait|AppendWaitOnEvents|AppendBarrier){_ENDING}"
)
EVENT_RECORDS = re.compile(rf"(?:EventRecord|RecordEvent|PlaceNotifier|AppendSignalEvent){_ENDING}")

# Calls that only ask whether something has ended: a host that polls makes many of them.
QUERIES = re.compile(
    rf"(?:(?:Event|Stream|Queue|Notifier|Fence)Query(?:Status)?|Query(?:Event|Stream|Notifier)(?:Status)?|EventGetInfo){_ENDING}"
)


def collective_kind_of(name: str) -> CollectiveKind:
    """The kind of a collective, from its name in a library, a profiler or a device kernel.

    "ncclDevKernel_AllReduce_Sum_f32", "_allgather_base" and "nccl:send 0->1" are such names.
    `CollectiveKind.UNKNOWN` where it does not identify one.
    """
    plain = _SEPARATORS.sub("", name.partition("(")[0].lower())
    return next((kind for pattern, kind in _SPELLINGS if pattern.search(plain)), CollectiveKind.UNKNOWN)


def _function(kernel: str) -> str:
    """Name of a kernel's function with its namespaces, but without return type, template arguments and parameters."""
    anonymous = kernel.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    return re.split(r"[<(]", anonymous, maxsplit=1)[0] if not anonymous.startswith("Memcpy") else anonymous


def communicates(kernel: str) -> bool:
    """Whether a device's kernel or copy is known to move data between devices, and to do nothing else."""
    return _known_to_move(kernel) and not computes_too(kernel)


def computes_too(kernel: str) -> bool:
    """Whether one kernel both moves data between devices and computes, like an all-reduce with a norm or a GEMM."""
    function = _function(kernel)
    moves = _known_to_move(kernel) or bool(_COLLECTIVE_WORD.search(function.rpartition("::")[2]))
    return moves and not _COMPILED_KERNEL.search(kernel) and bool(_COMPUTES.search(function.rpartition("::")[2]))


def is_one_sided(kernel: str) -> bool:
    """Whether a device moves data without another's taking part, so that it waits for none."""
    return bool(_ONE_SIDED.search(kernel))


def is_communication_op(name: str) -> bool:
    """Whether an op of the host does nothing but communicate."""
    return is_library_span(name) or bool(_COMMUNICATION_OP.search(name))


def is_library_span(name: str) -> bool:
    """Whether a record is a library's own of one collective, like "nccl:all_reduce"."""
    return bool(_LIBRARY_SPAN.search(name))


def library_of(name: str) -> str:
    """The library whose name is in that of a kernel or of a record of communication; empty if none is."""
    match = _LIBRARY.search(name)
    return match[0].lower() if match else ""


def may_describe_collective(name: str) -> bool:
    """Whether a record may tell the group, the size and the kind of a collective.

    NCCL runs a kernel named oneRankReduce for the average of a group of one rank; its sums run nothing.
    """
    return is_library_span(name) or name == "record_param_comms" or "oneRankReduce" in name or communicates(name)


def may_communicate(kernel: str) -> bool:
    """Whether a kernel that an op of communication launched may be the communication: it is none that computes or copies."""
    return not (_GENERAL_KERNEL.search(kernel) or _COMPILED_KERNEL.search(kernel) or _COMPUTES.search(_function(kernel)))


def is_named_after_collective(kernel: str) -> bool:
    """Whether the function of a kernel has the name of a collective, which alone is weak evidence of what it does."""
    return bool(_COLLECTIVE_WORD.search(_function(kernel).rpartition("::")[2]))


def kernel_communication(kernel: str) -> CollectiveKind:
    """The collective that a kernel of communication carries out; `CollectiveKind.UNKNOWN` if its name does not say."""
    function = _function(kernel)
    kind = next((kind for pattern, kind, _ in _COMMUNICATION_KERNELS if pattern.search(function)), CollectiveKind.UNKNOWN)
    return kind if kind is not CollectiveKind.UNKNOWN else collective_kind_of(function)


def _known_to_move(kernel: str) -> bool:
    return bool(_KNOWN_TO_MOVE.search(_function(kernel))) and not _COMPILED_KERNEL.search(kernel)


def dtype_of(name: str) -> str:
    """An element type as numpy and PyTorch call it; "float32" of "float", "Float" and "c10::Float"; empty where it is none."""
    plain = name.lower().removeprefix("c10::").removeprefix("torch.")
    dtype = _DTYPES.get(name.lower()) or _DTYPES.get(plain)
    return dtype or (plain if _FLOAT8.fullmatch(plain) else "")


def host_waits(name: str) -> bool:
    """Whether the host waits for the device in a call with this name."""
    return any(pattern.search(name) for pattern in (DEVICE_WAITS, STREAM_WAITS, EVENT_WAITS, MEMORY_WAITS))


def role_in_mxnet(name: str) -> Role:
    """The role of an operator of MXNet, by its own name or that of its node; a node's backward operator is "<node> backward"."""
    if "_update" in name:
        return Role.UPDATE
    if "CopyCPU2CPU" in name:
        return Role.COPY
    return Role.BACKWARD if name.endswith(" backward") or name.startswith("_backward_") else Role.FORWARD


def role_in_server(name: str) -> Role:
    """The role of an operation of a parameter server (MXNet or BytePS): update or copy. Sums have no role."""
    role = Role.COPY if "COPY_" in name else role_in_mxnet(name)
    return role if role in (Role.UPDATE, Role.COPY) else Role.UNKNOWN


def made_for_backward(name: str, op: str) -> bool:
    """The role of a node of an executed graph, by TensorFlow's scope of gradients or MXNet's type of operators."""
    return "gradient_tape/" in name or name.startswith("gradients/") or op.startswith("_backward_")


def copies_of_gathers(units: Sequence[str | None], ops: Sequence[str]) -> list[tuple[int, int]]:
    """Ops that copy what PyTorch's ``fully_shard`` gathers, into and out of buffers: (gather, op), both by position.

    Parameters
    ----------
    units
        Of each collective of a rank's step, in enqueue order, the unit of the model that it gathers ("" for the model
        itself); None: it gathers none.
    ops
        Names of the step's ops on the main thread in their order, after the innermost annotation of ``fully_shard`` around each.
        Copies of a unit belong to its gathers in order, if there are as many.
    """
    gathers: defaultdict[str, list[int]] = defaultdict(list)
    for number, unit in enumerate(units):
        if unit is not None:
            gathers[unit].append(number)
    rows: defaultdict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(ops):
        if name.startswith("FSDP::all_gather"):
            rows[name].append(row)
    pairs = []
    for unit, numbers in gathers.items():
        around = f" ({unit})" if unit else ""
        copied_in = rows[f"FSDP::all_gather{around}/fsdp::all_gather_copy_in"]
        copied_out = rows[f"FSDP::all_gather_copy_out{around}/fsdp::split_with_sizes_copy"]
        if len(copied_in) == len(copied_out) == len(numbers):
            pairs += [*zip(numbers, copied_in, strict=True), *zip(numbers, copied_out, strict=True)]
    return pairs
