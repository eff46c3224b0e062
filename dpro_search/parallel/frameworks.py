"""Frameworks that a description can name: how each runs a step (`Runtime`), and its usual ZeRO stage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from dpro_search.cluster import Device
from dpro_search.errors import InputError
from dpro_search.parallel.gpu_ops import AdapterKernels, AttentionKernels, ImageLayout, Kernels, LossKernels, NormKernels
from dpro_search.parallel.memory.rules import MemoryRules
from dpro_search.parallel.runtime import GRAPH_TIMES, HostTimes, Runtime, Selective
from dpro_search.parallel.schedule import Schedule

_COMPILED_US = 10.0  # Host time of a kernel that compiled code starts from C++: PyTorch's launch alone, estimated.
_LAUNCH_US = 25.0  # Host time of an op of an eager module: PyTorch's dispatch and launch (10 us), and Python.


def as_compiled(runtime: Runtime, *, compiled: bool) -> Runtime:
    """A runtime of PyTorch whose layers `torch.compile` compiles, or whose ops run one by one.

    Compiled, activations, rotations and norms are fused kernels that C++ starts; eager, each op of a module is dispatched in Python
    and is a kernel of its own, and DTensor's collectives of tensor parallel ranks run beside nothing.
    """
    kernels = replace(
        runtime.kernels,
        fused=compiled,
        adapters=AdapterKernels.COMPILED if compiled else AdapterKernels.APART,
        norm=NormKernels.FUSED if compiled else NormKernels.TWICE,
        batch_norm=NormKernels.COMPILED if compiled else NormKernels.APART,
        instance_norm=NormKernels.COMPILED if compiled else NormKernels.APART,
        layout=ImageLayout.CHANNELS_LAST if compiled else ImageLayout.CHANNELS_FIRST,  # torch/_inductor: `layout_optimization`
    )
    if compiled:
        return replace(runtime, kernels=kernels, host=replace(runtime.host, forward_us=_COMPILED_US, backward_us=_COMPILED_US))
    host = replace(runtime.host, forward_us=_LAUNCH_US, backward_us=12.0)
    return replace(runtime, kernels=kernels, host=host, overlap_tensor=False)


Attention = Literal["flash2", "flash3", "sdpa", "cudnn", "unfused"]
_HOPPER = re.compile(r"\bG?H([1-9]00|20)\b")


def with_attention(runtime: Runtime, attention: Attention, device: Device) -> Runtime:
    """A runtime with another kernel of attention.

    ``sdpa`` is PyTorch's `scaled_dot_product_attention`, which is flash-attention 2 on NVIDIA GPUs from Ampere on, also on Hopper
    (aten/src/ATen/native/transformers/cuda). ``unfused`` is PyTorch's own ops in PyTorch's frameworks, and two products with a
    fused softmax between them in others. flash-attention leaves its output with the batch first, which Transformer Engine copies.

    Raises
    ------
    InputError
        The device has no such kernel.
    """
    nvidia = device.vendor == "NVIDIA"
    if attention == "flash3" and not (nvidia and _HOPPER.search(device.name.upper())):
        raise InputError(f"flash-attention 3 is for Hopper GPUs (its README), not {device.name}: use flash2 or cudnn")
    if attention == "cudnn" and not nvidia:
        raise InputError(f"cuDNN is NVIDIA's, not for {device.name}: use flash2")
    if attention in ("flash2", "cudnn") and device.peak_flops_per_s("bf16") is None:
        raise InputError(f"{attention} needs a GPU from Ampere on, and {device.name} has no bf16: use sdpa or unfused")
    if attention == "unfused":
        eager = runtime.kernels.loss is LossKernels.LOG_SOFTMAX
        kernels = AttentionKernels.EAGER if eager else AttentionKernels.SCORES
    else:
        kernels = AttentionKernels.NEWEST if attention in ("flash3", "cudnn") else AttentionKernels.FLASH_2
    copied = attention in ("flash2", "flash3") and runtime.memory.transformer_engine
    memory = replace(runtime.memory, flash_copy=copied)
    return replace(runtime, kernels=replace(runtime.kernels, attention=kernels), memory=memory)


def attention_of(runtime: Runtime, device: Device) -> str:
    """The kernel of attention that a framework has where a job does not say it."""
    if runtime.kernels.stores_scores:
        return "unfused"
    if runtime.kernels.attention is not AttentionKernels.NEWEST:
        return "flash2"
    return "flash3" if device.vendor == "NVIDIA" and _HOPPER.search(device.name.upper()) else "cudnn"


def as_of_version(framework: Framework, version: str) -> Runtime:
    """The runtime of a framework at a version.

    Raises
    ------
    InputError
        It is no version, or none of its versions is predicted otherwise.
    """
    if not framework.before:
        raise InputError("no version of this framework is predicted otherwise; leave it out")
    if not re.fullmatch(r"\d+(\.\d+)*", version):
        raise InputError(f"'{version}' is no version: write it like 0.12")
    given, runtime = tuple(map(int, version.split("."))), framework.runtime
    for first, rules in framework.before:
        if given < first:
            runtime = replace(runtime, memory=replace(runtime.memory, **rules))
    return runtime


ON_WHEELS = frozenset(("fsdp", "llm-foundry", "torchtitan", "nanotron", "pytorch", "pytorch-2", "torchtune", "litgpt"))
"""Frameworks that run on PyTorch's wheels, or in a container."""
FASTER_CUDA = (12, 5)
"""From which on cuBLAS is as fast on Hopper as that of NVIDIA's containers: 13.0 is (a recording on H200, in
`tests/experiments/test_parallel_on_gpu.py`), 12.1 to 12.4 are not (experiments/truth); of those between it is assumed."""


def with_cuda(runtime: Runtime, version: str) -> Runtime:
    """A runtime of PyTorch with the libraries of a CUDA version (`Kernels.wheels`)."""
    if not re.fullmatch(r"\d+\.\d+", version):
        raise InputError(f"cuda '{version}' is no version: write it like 12.4")
    is_slower = tuple(map(int, version.split("."))) < FASTER_CUDA
    return replace(runtime, kernels=replace(runtime.kernels, wheels=is_slower))


Loss = Literal["whole", "chunked", "tiled"]
# Of a logit, when most is held: PyTorch's loss has it in 16 bits, in fp32, log-softmax and its gradient in fp32; in chunks
# (torchtune's CEWithChunkedOutputLoss, LitGPT's chunked_cross_entropy) it is in 16 bits, as its gradient is, and an eighth in fp32.
LOGITS_BYTES: Mapping[Loss, float] = {"whole": 14.0, "chunked": 5.5}


def with_loss(runtime: Runtime, loss: Loss) -> Runtime:
    """A runtime of PyTorch with another loss; ``tiled`` computes the head's product and the loss for some tokens at a time."""
    if loss == "tiled":
        kernels = replace(runtime.kernels, loss=LossKernels.FUSED)
        return replace(runtime, kernels=kernels, memory=replace(runtime.memory, tiled_loss=True))
    kernels = replace(runtime.kernels, loss=LossKernels.LOG_SOFTMAX)
    return replace(runtime, kernels=kernels, memory=replace(runtime.memory, logits_bytes=LOGITS_BYTES[loss]))


class Framework(NamedTuple):
    """A framework for training on many devices."""

    runtime: Runtime
    zero_stage: int  # Where a job sets none.
    zero_stages: tuple[int, ...] = (0, 1)  # That a search may set, as all that follows.
    splits: tuple[str, ...] = ("tp", "pp", "cp", "ep")  # Degrees beside data parallel ones.
    schedules: tuple[Schedule, ...] = (Schedule.ONE_F_ONE_B,)
    uneven_stages: bool = False  # Layers of each stage can be given.
    replicates: bool = False  # ZeRO splits over a part of the replicas (HSDP).
    rings: bool = False  # Keys and values of context parallel ranks can go round them.
    recomputes_some: bool = False  # The first layers of each stage, and not all.
    compiles: bool = False  # Whether a job may be eager or compiled (`as_compiled`).
    # How versions before one differ in memory: pairs of the version and what `MemoryRules` were before it.
    before: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...] = ()
    # Further settings that it has (`OPTIONS`), each with the least stage of ZeRO that it goes with.
    options: Mapping[str, int] = {}
    target: str | None = None  # What plans of its jobs are exported to where nothing else is said.


# CUDA queues 1,024 kernels and events before the host waits; nanotron's forward pass of a layer enqueues about 60: 40 kernels, and
# four collectives with events and copies (its llama.py).
_LAUNCHES_QUEUED, _NANOTRON_LAUNCHES = 1024, 60

_FSDP = Runtime(
    name="PyTorch FSDP",
    host_gradients=True,
    host_parameters=True,
    overlap_offload=False,
    selective=Selective.EVERY_SECOND_MATMUL,
    stages_reduce_once=True,
    tokens_once_a_host=False,
    regather_inputs=False,
    host=HostTimes(layer_us=400.0),  # Hooks before and after each layer, which gather, free and reduce (estimated).
    kernels=Kernels(attention=AttentionKernels.FLASH_2, norm=NormKernels.TWICE, loss=LossKernels.LOG_SOFTMAX),
    gradient_bytes=2.0,
    accumulate_bytes=8.0,  # Gradients of a layer are joined in one flat tensor and cast to be reduced.
    memory=MemoryRules(
        logits_bytes=LOGITS_BYTES["whole"], weighted_activations=False, transformer_engine=False, drops_gradients=True
    ),
)
# Composer's loss is flash-attention's, which writes gradients over the logits.
_LLM_FOUNDRY = replace(_FSDP, name="LLM Foundry", memory=replace(_FSDP.memory, logits_bytes=4.0))
# Fused softmax, bias and GELU, layer norm; gradients of each micro-batch are added in 16 bits, reduced and gathered at the end.
_MEGATRON_DEEPSPEED = Runtime(
    name="Megatron-DeepSpeed",
    host_gradients=True,
    tokens_once_a_host=False,
    kernels=Kernels(attention=AttentionKernels.SCORES, attention_dropout=True, loss=LossKernels.VOCAB_PARALLEL),
    overlap_gradients=False,
    overlap_gathers=False,
    overlap_sends=False,
    overlap_tensor=False,
    gradient_bytes=2.0,
    memory=MemoryRules(part_bytes=6.0, keeps_outputs=True, flat_elements=5e8, weighted_activations=False, transformer_engine=False),
)
# nanotron's sources (early 2025): flash-attention 2 and its rotation, SwiGLU of PyTorch's ops, Megatron-LM's loss in fp32,
# gradients added to fp32 copies by a hook, parameters gathered after the update.
_NANOTRON = Runtime(
    name="nanotron",
    tokens_once_a_host=False,
    # Beside each collective of tensor parallel ranks it allocates and splits tensors, and multiplies in up to three pieces; a hook
    # of each parameter adds its gradient, and its norm, scaling, update and copy are calls of their own (estimated).
    host=HostTimes(collective_us=145.0, layer_us=300.0, parameter_us=200.0),
    kernels=Kernels(fused=False, attention=AttentionKernels.FLASH_2, loss=LossKernels.VOCAB_PARALLEL),
    overlap_split_gradients=False,  # trainer.py (`make_ddp`): sums in fp32 that ZeRO splits have no DistributedDataParallel.
    overlap_gathers=False,
    overlap_sends=False,
    bucket_bytes=50 * 2.0**20,  # DistributedDataParallel's 25 MiB of 16-bit gradients, which a hook sums in fp32.
    first_bucket_bytes=2 * 2.0**20,
    accumulate_bytes=10.0,
    stages_by_cost=True,
    # models/llama.py: queries stay in the storage of all three, keys and values are copied; SiLU and product apart; loss in fp32 on
    # an fp32 copy. optim/gradient_accumulator.py: 16-bit gradients until the pass ends, DDP's buckets without ZeRO. distributed.py
    # (`all_gather_coalesced`): flat copies of the parameters, and those of torch.distributed's list all-gather.
    memory=MemoryRules(
        pass_gradient_bytes=2.0,
        bucket_bytes=2.0,
        step_bytes=4.0,
        rotation_copies=(0.0, 1.0, 1.0),
        gate_copies=1.0,
        weighted_activations=False,
        logits_bytes=8.0,
        transformer_engine=False,
        gather_buffers=2,  # parallel/tensor_parallel/functional.py: MemoryBuffer "allgather" and "allgather2".
        layers_ahead=_LAUNCHES_QUEUED / _NANOTRON_LAUNCHES,
    ),
)
_PYTORCH = Runtime(
    name="PyTorch, eager",
    overlap_offload=False,
    selective=Selective.EVERY_SECOND_MATMUL,
    stages_reduce_once=True,
    tokens_once_a_host=False,
    regather_inputs=False,
    kernels=Kernels(
        fused=False,
        attention=AttentionKernels.EAGER,
        attention_dropout=True,
        norm=NormKernels.TWICE,
        batch_norm=NormKernels.APART,
        instance_norm=NormKernels.APART,
        layout=ImageLayout.CHANNELS_FIRST,
        loss=LossKernels.LOG_SOFTMAX,
        autocast=True,
    ),
    # Hugging Face's eager modules: norms in fp32, logits in fp32 with a shifted copy, log-softmax.
    memory=MemoryRules(
        norm_bytes=6.0,
        gate_copies=1.0,
        rotation_copies=(0.0, 0.0, 0.0),
        weighted_activations=False,
        logits_bytes=LOGITS_BYTES["whole"],
        transformer_engine=False,
        drops_gradients=True,
    ),
)
_PYTORCH_2 = Runtime(
    name="PyTorch 2",
    host_gradients=True,
    host_parameters=True,
    overlap_offload=False,
    selective=Selective.EVERY_SECOND_MATMUL,
    stages_reduce_once=True,
    tokens_once_a_host=False,
    regather_inputs=False,
    # Each op of a captured step is dispatched and launched on its own; in the backward pass from C++.
    host=HostTimes(forward_us=_LAUNCH_US, backward_us=12.0, layer_us=0.0),  # The latter estimated.
    kernels=Kernels(
        fused=False,
        attention=AttentionKernels.FLASH_2,
        batch_norm=NormKernels.APART,
        instance_norm=NormKernels.APART,
        layout=ImageLayout.CHANNELS_FIRST,
        loss=LossKernels.LOG_SOFTMAX,
    ),
    clip_gradients=False,
    overlap_tensor=False,
    bucket_bytes=25 * 2.0**20,
    # Ranks that share the vocabulary compute softmax and gradients by themselves (torch/distributed/tensor/parallel/loss.py).
    memory=MemoryRules(
        logits_bytes=LOGITS_BYTES["whole"],
        split_logits_bytes=18.0,
        weighted_activations=False,
        transformer_engine=False,
        drops_gradients=True,
    ),
)
# Parameters, gradients and the moments of Adam are in 16 bits, without a copy in fp32 (torchtune's `dtype: bf16`, LitGPT's
# "bf16-true").
_PURE_16_BITS = replace(
    _PYTORCH_2,
    gradient_bytes=2.0,
    optimizer_bytes=4.0,
    main_bytes=0.0,
    memory=replace(_PYTORCH_2.memory, logits_bytes=LOGITS_BYTES["chunked"]),
)
# litgpt/model.py: norms in fp32 written in Python; queries and keys are copied to be rotated, keys and values for each head.
# Fabric converts a model's output to fp32 (plugins/precision/half.py), so that logits in fp32 are there beside their softmax
# (chunked_cross_entropy). bitsandbytes' matmuls keep their inputs (autograd/_functions.py, `MatMul4Bit`).
_LITGPT = replace(
    _PURE_16_BITS,
    name="LitGPT",
    memory=replace(
        _PYTORCH.memory,
        norm_bytes=4.0,
        rotation_copies=(1.0, 1.0, 0.0),
        copies_shared_heads=True,
        adapter_mask_bytes=1.0,  # --lora_dropout is 0.05 by default (litgpt/finetune/lora.py)
        quantized_input_bytes=2.0,
        logits_bytes=10.0,
    ),
)
# PyTorch on CPU cores: `fully_shard` waits for each collective there, and gives each layer one of its own; a script that follows a
# plan takes the mean of the losses of all ranks before an update, in place of a norm (runtime/follow/parallel_plan.py).
_PYTORCH_GLOO = replace(
    _PYTORCH_2,
    name="PyTorch 2 on Gloo",
    overlap_gradients=False,
    overlap_gathers=False,
    blocking=True,
    bucket_bytes=0.0,
    clip_gradients=True,
)
# A graph of ops that XLA fuses, started from C++; attention of 2020: scale, mask, softmax and dropout of stored scores are clusters
# with a reduction each, which XLA does not join; Horovod.
_TENSORFLOW = Runtime(
    name="TensorFlow",
    tokens_once_a_host=False,
    host=HostTimes(forward_us=10.0, backward_us=10.0, collective_us=100.0, parameter_us=10.0),
    kernels=Kernels(
        attention=AttentionKernels.EAGER,
        attention_dropout=True,
        batch_norm=NormKernels.COMPILED,
        instance_norm=NormKernels.COMPILED,
        layout=ImageLayout.HALF_LAST,
        loss=LossKernels.LOG_SOFTMAX,
        autocast=True,
    ),
    memory=MemoryRules(weighted_activations=False, transformer_engine=False),
)
_GRAPHS = Runtime(
    name="Megatron-Core, CUDA graphs",
    host=GRAPH_TIMES,
)

# Megatron-Core: --pipeline-model-parallel-layout, --num-distributed-optimizer-instances, --cp-comm-type, --recompute-method block.
_MEGATRON = Framework(
    Runtime(),
    1,
    schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
    uneven_stages=True,
    replicates=True,
    rings=True,
    recomputes_some=True,
    # --cuda-graph-impl; --optimizer-cpu-offload needs --use-precision-aware-optimizer, which needs the distributed optimizer.
    # --overlap-moe-expert-parallel-comm.
    options={"offload_optimizer": 1, "offload_activations": 0, "cuda_graphs": 0, "overlap_experts": 0},
    before=(((0, 12), {"weighted_activations": False}),),  # experts.py: weights multiply what experts give, which is kept
    target="megatron",
)
# `fully_shard` with CPUOffloadPolicy; torch.autograd.graph.save_on_cpu, which needs no framework.
_FSDP_OFFLOADS = {"offload_optimizer": 3, "offload_activations": 0}

# GPipe is never faster than 1F1B; DualPipe is DeepSeek's own code.
_TORCH_SCHEDULES = tuple(schedule for schedule in Schedule if schedule not in (Schedule.GPIPE, Schedule.DUAL_PIPE))

FRAMEWORKS: Mapping[str, Framework] = {
    "megatron-core": _MEGATRON,
    "megatron-core-cuda-graphs": _MEGATRON._replace(runtime=_GRAPHS),
    # `fully_shard` on a mesh of two dims, torch.distributed's context_parallel, checkpoint_wrapper of single layers.
    "fsdp": Framework(
        _FSDP,
        3,
        (3,),
        compiles=True,
        replicates=True,
        rings=True,
        recomputes_some=True,
        options=_FSDP_OFFLOADS,
        target="pytorch",
    ),
    "llm-foundry": Framework(
        _LLM_FOUNDRY,
        3,
        (3,),
        splits=(),
        compiles=True,
        replicates=True,
        recomputes_some=True,
        options={"offload_activations": 0},  # Composer's activation_cpu_offload
        target="pytorch",
    ),
    "torchtitan": Framework(
        replace(_PYTORCH_2, name="torchtitan"),
        3,
        (3,),
        compiles=True,
        schedules=_TORCH_SCHEDULES,
        uneven_stages=True,
        replicates=True,
        options={"offload_optimizer": 3},  # training.enable_cpu_offload
        target="torchtitan",
    ),
    "megatron-deepspeed": Framework(_MEGATRON_DEEPSPEED, 1, options={"offload_optimizer": 1}),
    "nanotron": Framework(_NANOTRON, 1),
    # torch.distributed.pipelining: a stage is any module.
    "pytorch": Framework(
        _PYTORCH,
        0,
        compiles=True,
        schedules=_TORCH_SCHEDULES,
        uneven_stages=True,
        rings=True,
        recomputes_some=True,
        options={"offload_activations": 0, "cuda_graphs": 0},  # torch.cuda.make_graphed_callables
        target="pytorch",
    ),
    "pytorch-2": Framework(
        _PYTORCH_2,
        0,
        (0, 3),
        compiles=True,
        schedules=_TORCH_SCHEDULES,
        uneven_stages=True,
        replicates=True,
        rings=True,
        recomputes_some=True,
        options={**_FSDP_OFFLOADS, "cuda_graphs": 0},
        target="pytorch",
    ),
    # torchtune's distributed recipes have tensor_parallel_dim and context_parallel_dim, and no pipelines.
    "torchtune": Framework(
        replace(_PURE_16_BITS, name="torchtune", overlap_offload=True),
        0,
        (0, 3),
        splits=("tp", "cp"),
        compiles=True,
        replicates=True,
        options=_FSDP_OFFLOADS,  # fsdp_cpu_offload, enable_activation_offloading
    ),
    "litgpt": Framework(
        _LITGPT,
        0,
        (0, 3),
        splits=(),
        compiles=True,
        replicates=True,
    ),
    "pytorch-gloo": Framework(
        _PYTORCH_GLOO,
        0,
        (0, 3),
        schedules=(Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
        uneven_stages=True,
        replicates=True,
        recomputes_some=True,
        target="pytorch",
    ),
    "tensorflow": Framework(_TENSORFLOW, 0, (0,)),
}
