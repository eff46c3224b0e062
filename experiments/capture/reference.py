"""What PyTorch's own tools say of a step: FLOPs, collectives, saved tensors, memory. Needs PyTorch only.

    python reference.py MODEL '{"dp_shard": 8}' BATCH SEQUENCE PRECISION [peak]

It shares no code with the capture: `FlopCounterMode`, `CommDebugMode`, a hook on tensors that autograd saves, `MemTracker` and
`FSDPMemTracker` on tensors without data, and a count of all ops by a dispatch mode of ten lines.
"""

import contextlib
import json
import sys
from collections import Counter

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
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
        if func.namespace not in ("prim", "profiler") and not view:
            self.found[func._schema.name] += 1
        return result


def layers_of(model):
    for name in ("h", "layers", "blocks"):
        if hasattr(model, name):
            return getattr(model, name)
    raise SystemExit("no layers")


def built(name, mesh_sizes, precision):
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    if not mesh_sizes:
        with fake:
            return getattr(models, name)(), fake, None
    ranks = 1
    for size in mesh_sizes.values():
        ranks *= size
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    names = [axis for axis in ("dp_replicate", "dp_shard", "tp") if axis in mesh_sizes]
    mesh = init_device_mesh("cpu", tuple(mesh_sizes[axis] for axis in names), mesh_dim_names=tuple(names))
    with torch.device("meta"):
        model = getattr(models, name)()
    tied = {"gpt2": ("lm_head", "wte"), "bert": ("decoder", "tokens")}.get(name)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {path: style() for path, style in PLANS[name].items()})
    if "dp_shard" in names:
        dims = tuple(axis for axis in names if axis != "tp")
        kinds = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if precision == "bf16" else {}
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh[dims], mp_policy=MixedPrecisionPolicy(**kinds))
        fully_shard(model, mesh=mesh[dims], mp_policy=MixedPrecisionPolicy(**kinds))
    with fake:
        model.to_empty(device="cpu")
        if tied:
            getattr(model, tied[0])._parameters["weight"] = getattr(model, tied[1])._parameters["weight"]
    return model, fake, mesh


def main():
    name, mesh_sizes, batch, sequence, precision = sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:5]), sys.argv[5]
    model, fake, _ = built(name, mesh_sizes, precision)
    parameters = {id(each): each for each in model.parameters()}.values()
    autocast = precision == "bf16" and "dp_shard" not in mesh_sizes
    answer = {}
    with fake:
        if name == "resnet50":
            inputs = torch.randn(batch, 3, 224, 224)
        else:
            inputs = torch.randint(
                next(m for m in model.modules() if isinstance(m, nn.Embedding)).num_embeddings, (batch, sequence)
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

        def forward():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                output = model(inputs)
            if output.dim() == 3:
                return F.cross_entropy(output.flatten(0, 1).float(), inputs.flatten())
            return F.cross_entropy(output.float(), torch.randint(output.shape[1], (output.shape[0],)))

        def step():
            forward().backward()
            optimizer.step()
            optimizer.zero_grad()

        saved = {}

        def keep(tensor):
            local = getattr(tensor, "_local_tensor", tensor)
            saved[local.untyped_storage()._cdata] = local.untyped_storage()
            return tensor

        step()
        count = Count()
        with count:  # alone: the other modes run ops of their own
            step()
        comms = CommDebugMode() if mesh_sizes else contextlib.nullcontext()  # it cannot follow BERT's modules
        with FlopCounterMode(display=False) as flops, comms:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = forward()
            held = {key: storage.nbytes() for key, storage in saved.items()}
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        answer["flops"] = flops.get_total_flops()
        counts = comms.get_comm_counts() if mesh_sizes else {}
        answer["collectives"] = {
            str(kind).rpartition(".")[2].strip("_"): number for kind, number in comms.get_comm_counts().items()
        }
        answer["ops"] = dict(count.found)
        local = [getattr(each, "_local_tensor", each) for each in parameters]
        own = {each.untyped_storage()._cdata for each in local}
        answer["saved_bytes"] = sum(size for key, size in held.items() if key not in own)
        answer["parameters_bytes"] = sum(each.numel() * each.element_size() for each in local)
        answer["parameters"] = sum(each.numel() for each in parameters)
        del loss
        saved.clear()
        if len(sys.argv) > 6:
            answer["peak_bytes"] = peak_of(model, optimizer, step, mesh_sizes)
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
