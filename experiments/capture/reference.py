"""What PyTorch's own tools say of a step: FLOPs, collectives, saved tensors, memory. Needs PyTorch only.

    python reference.py MODEL '{"mesh": {"dp_shard": 8}}' BATCH SEQUENCE PRECISION [peak]

Of a pipeline the JSON also has rank, schedule (a class of torch.distributed.pipelining), stages (of each rank) and micro_batches.
It shares no code with the capture: `FlopCounterMode`, `CommDebugMode`, a hook on tensors that autograd saves, `MemTracker` and
`FSDPMemTracker` on tensors without data, and a count of all ops by a dispatch mode of ten lines.
"""

import contextlib
import copy
import json
import sys
from collections import Counter

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

LLAMA_PLAN = {
    **{f"layers.*.self_attn.{name}_proj": ColwiseParallel for name in "qkv"},
    "layers.*.self_attn.o_proj": RowwiseParallel,
    "layers.*.mlp.gate_proj": ColwiseParallel,
    "layers.*.mlp.up_proj": ColwiseParallel,
    "layers.*.mlp.down_proj": RowwiseParallel,
}
PLANS = {
    "llama": LLAMA_PLAN,
    "moe": {name: style for name, style in LLAMA_PLAN.items() if "mlp" not in name},
    "gpt2": {"h.*.mlp.c_fc": ColwiseParallel, "h.*.mlp.c_proj": RowwiseParallel},
    "bert": {
        **{f"layers.*.{name}": ColwiseParallel for name in ("query", "key", "value", "fc1")},
        **{f"layers.*.{name}": RowwiseParallel for name in ("out_proj", "fc2")},
    },
}


def _collectives():
    """Counts collectives, but not by module: PyTorch 2.13 loses its place among BERT's and ResNet's modules (IndexError)."""
    mode = CommDebugMode()
    mode.advanced_module_tracker.__enter__ = mode.advanced_module_tracker.__exit__ = lambda *_: None
    mode.advanced_module_tracker.module_parents_dict[""] = []
    return mode


class Count(TorchDispatchMode):
    """Ops that are no views, by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        view = view and storages(result) <= storages((args, kwargs))  # else it had to copy
        if func.namespace not in ("prim", "profiler") and not view:
            self.found[func._schema.name] += 1
        return result


def storages(value):
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, dict):
        value = list(value.values())
    return set().union(*map(storages, value)) if isinstance(value, (list, tuple)) else set()


def layers_of(model):
    for name in ("h", "layers", "blocks"):
        if hasattr(model, name):
            return getattr(model, name)
    raise SystemExit("no layers")


AROUND = {  # modules before and behind the layers, and the layers
    "gpt2": (("wte", "wpe"), "h", ("ln_f", "lm_head")),
    "llama": (("embed_tokens",), "layers", ("norm", "lm_head")),
    "moe": (("embed_tokens",), "layers", ("norm", "lm_head")),
}


def built(name, asked, precision):
    """The modules of the rank: the whole model, or its stages; mode for tensors without data; mesh."""
    sizes = asked["mesh"]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    if not sizes:
        with fake:
            return [getattr(models, name)()], fake, None
    ranks = 1
    for axis, size in sizes.items():
        ranks *= 1 if axis == "ep" else size
    dist.init_process_group("fake", rank=asked.get("rank", 0), world_size=ranks, store=FakeStore())
    names = [axis for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if axis in sizes]
    mesh = init_device_mesh("cpu", tuple(sizes[axis] for axis in names), mesh_dim_names=tuple(names))
    with torch.device("meta"):
        whole = getattr(models, name)()
    parts = [whole]
    if "pp" in sizes:
        rank, count = mesh["pp"].get_local_rank(), sizes["pp"] * asked["stages"]
        parts = [stage(whole, name, number, count) for number in range(rank, count, sizes["pp"])]
    for model in parts:
        if "ep" in sizes:
            experts = dist.new_group(list(range(sizes["ep"])))
            for layer in layers_of(model):
                layer.mlp.experts = Exchanged(layer.mlp.experts, sizes["ep"], experts)
        if "tp" in names:
            parallelize_module(model, mesh["tp"], {path: style() for path, style in PLANS[name].items()})
        if "dp_shard" in names:
            dims = tuple(axis for axis in names if axis in ("dp_replicate", "dp_shard"))
            kinds = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if precision == "bf16" else {}
            if "ep" in sizes:  # experts are shared by the ranks that have the same
                shares = init_device_mesh("cpu", (ranks // sizes["ep"], sizes["ep"]), mesh_dim_names=("same", "ep"))["same"]
                for layer in layers_of(model):
                    fully_shard(layer.mlp.experts.experts, mesh=shares, mp_policy=MixedPrecisionPolicy(**kinds))
            for layer in layers_of(model):
                fully_shard(layer, mesh=mesh[dims], mp_policy=MixedPrecisionPolicy(**kinds))
            fully_shard(model, mesh=mesh[dims], mp_policy=MixedPrecisionPolicy(**kinds))
    tied = {"gpt2": ("lm_head", "wte"), "bert": ("decoder", "tokens")}.get(name)
    with fake:
        for model in parts:
            model.to_empty(device="cpu")
            if tied and all(getattr(model, each) is not None for each in tied):
                getattr(model, tied[0])._parameters["weight"] = getattr(model, tied[1])._parameters["weight"]
    return parts, fake, mesh


def stage(whole, name, number, count):
    """As many layers of the model as other stages have, what is before them on the first and what is behind on the last."""
    before, layers, behind = AROUND[name]
    part = copy.deepcopy(whole)
    own = len(getattr(whole, layers)) // count
    setattr(part, layers, nn.ModuleList(list(getattr(part, layers))[number * own : (number + 1) * own]))
    for each in (before if number else ()) + (behind if number < count - 1 else ()):
        setattr(part, each, None)
    return part


class Exchanged(nn.Module):
    """Experts of this rank between two all-to-alls; tokens come and go by expert, as many for each."""

    def __init__(self, experts, ranks, group):
        super().__init__()
        self.experts, self.ranks, self.group = experts, ranks, group
        for key, parameter in list(experts.named_parameters()):
            setattr(experts, key, nn.Parameter(torch.empty(parameter.shape[0] // ranks, *parameter.shape[1:], device="meta")))

    def forward(self, tokens):
        count, each, width = tokens.shape
        there = all_to_all_single_autograd(tokens.reshape(-1, width), None, None, self.group)
        mine = there.view(self.ranks, count // self.ranks, each, width).transpose(0, 1).reshape(count // self.ranks, -1, width)
        done = self.experts(mine).view(count // self.ranks, self.ranks, each, width).transpose(0, 1).reshape(-1, width)
        return all_to_all_single_autograd(done, None, None, self.group).view(count, each, width)


@contextlib.contextmanager
def context(mesh, tokens, rotate):
    """A rank's part of the sequence, and attention over all of it, by the kernel that GPUs have."""

    def scaled_dot_product_attention(q, k, v, is_causal=False, enable_gqa=False):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    set_rotate_method(rotate)
    original, F.scaled_dot_product_attention = F.scaled_dot_product_attention, scaled_dot_product_attention
    with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1], no_restore_buffers={tokens}):
        yield
    F.scaled_dot_product_attention = original


def schedule_of(parts, asked, mesh, micro_batch, sequence, casts, loss_of):
    """The rank's schedule, with shapes given, as there is no rank to agree on them with."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining._utils import InferenceMode

    place, count = mesh["pp"].get_local_rank(), mesh["pp"].size() * asked["stages"]
    part = parts[0]
    width = next(each.shape[-1] for key, each in part.named_parameters() if key.endswith(("ln_1.weight", "input_layernorm.weight")))
    vocabulary = models.VOCAB_GPT2 if hasattr(part, "wte") else models.VOCAB_LLAMA
    low = torch.bfloat16 if casts else torch.float32
    stream = torch.empty(micro_batch, sequence, width, requires_grad=True)
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    logits = torch.empty(micro_batch, sequence, vocabulary, dtype=low, requires_grad=True)
    stages = []
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts)
    for each, number in zip(parts, range(place, count, mesh["pp"].size()), strict=True):
        each.forward = autocast(each.forward)
        ends = tokens if not number else stream, logits if number == count - 1 else stream
        stages.append(pipelining.PipelineStage(each, number, count, torch.device("cpu"), *ends, group=mesh.get_group("pp")))
        stages[-1]._inference_mode = InferenceMode.STATIC
    kind = getattr(pipelining.schedules, asked["schedule"])
    one = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    found = kind(stages[0] if one else stages, n_microbatches=asked["micro_batches"], loss_fn=autocast(loss_of))
    found._warmup_p2p = lambda *_: None

    def step(inputs):
        first, last = place == 0, place == mesh["pp"].size() - 1
        arguments = {"target": inputs, "losses": []} if last else {}
        found.step(*([inputs] if first else []), return_outputs=False, **arguments)

    return step


def main():
    name, asked, batch, sequence, precision = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:5]), sys.argv[5]
    sizes = asked["mesh"]
    parts, fake, mesh = built(name, asked, precision)
    parameters = list({id(each): each for model in parts for each in model.parameters()}.values())
    casts = precision == "bf16" and "dp_shard" not in sizes
    answer = {"parameter_tensors": len(parameters)}
    with fake:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)

        def loss_of(output, inputs):
            if output.dim() == 3:
                return F.cross_entropy(output.flatten(0, 1).float(), inputs.flatten())
            return F.cross_entropy(output.float(), torch.randint(output.shape[1], (output.shape[0],)))

        def new_inputs():
            if name == "resnet50":
                return torch.randn(batch, 3, 224, 224)
            table = next((m.num_embeddings for p in parts for m in p.modules() if isinstance(m, nn.Embedding)), 2)
            return torch.randint(table, (batch * asked.get("micro_batches", 1), sequence))

        pipeline = schedule_of(parts, asked, mesh, batch, sequence, casts, loss_of) if "pp" in sizes else None

        def passes(hooks):
            inputs = prepared.pop()
            with context(mesh["cp"], inputs, asked.get("rotate", "allgather")) if "cp" in sizes else contextlib.nullcontext():
                with hooks:
                    if pipeline is not None:
                        pipeline(inputs)
                        return
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
                        loss = loss_of(parts[0](inputs), inputs)
                held.update((key, storage.nbytes()) for key, storage in saved.items())  # FSDP has freed some
                loss.backward()

        def step(hooks=contextlib.nullcontext()):  # noqa: B008
            passes(hooks)
            optimizer.step()
            optimizer.zero_grad()

        saved, held = {}, {}
        prepared = [new_inputs() for _ in range(5)]  # context parallel makes its part of them, in place

        def keep(tensor):
            local = getattr(tensor, "_local_tensor", tensor)
            saved[local.untyped_storage()._cdata] = local.untyped_storage()
            held[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
            return tensor

        step()
        count = Count()
        with count:  # alone: the other modes run ops of their own
            step()
        comms = _collectives() if sizes and "pp" not in sizes else contextlib.nullcontext()
        with FlopCounterMode(display=False) as flops, comms:
            step(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        answer["flops"] = flops.get_total_flops()
        issued = comms.get_comm_counts() if isinstance(comms, CommDebugMode) else {}
        answer["collectives"] = {str(kind).rpartition(".")[2].strip("_"): number for kind, number in issued.items()}
        if "pp" in sizes:
            named = {name.partition("::")[2].strip("_"): number for name, number in count.found.items() if "c10d" in name}
            answer["collectives"] = {name: number for name, number in named.items() if not name.startswith(("wait", "wrap"))}
        answer["ops"] = dict(count.found)
        local = [getattr(each, "_local_tensor", each) for each in parameters]
        own = {each.untyped_storage()._cdata for each in local}
        answer["saved_bytes"] = sum(size for key, size in held.items() if key not in own)
        answer["parameters_bytes"] = sum(each.numel() * each.element_size() for each in local)
        answer["parameters"] = sum(each.numel() for each in parameters)
        saved.clear()
        if len(sys.argv) > 6:
            answer["peak_bytes"] = peak_of(parts[0], optimizer, step, sizes)
    print(json.dumps(answer))


def peak_of(model, optimizer, step, mesh_sizes):
    """By PyTorch's tracker, in the step behind one that it has seen."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = FSDPMemTracker(model, optimizer) if "dp_shard" in mesh_sizes else MemTracker()
    if "dp_shard" in mesh_sizes:
        tracker.track_inputs(())
    else:
        tracker.track_external(model, optimizer)
    try:
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
        found = tracker.get_tracker_snapshot("peak")
        return max(sum(value for kind, value in each.items() if "Total" in str(kind)) for each in found.values())
    except Exception as error:  # what the tracker cannot follow is said in the table
        return f"{type(error).__name__}: {error}"


main()
