"""The collectives that PyTorch issues in one training step of a small transformer, as JSON files: 0.json is that of the first case.

    python parallel_job.py '[{"dp": 8, "tp": 4, "data_parallel": "fsdp", ...}, ...]' FOLDER

The process group is the fake one: one process is rank 0 of any number, and nothing is sent. The model is that of torchtitan's
Llama: projections of queries, keys and values apart, a gated feed-forward network, RMS norms; or experts between two all-to-alls.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Options:
    """What is run; degrees of the strategy and sizes of the model."""

    dp: int = 1
    shard: int = 0  # Ranks over which FSDP splits (HSDP); 0: all of dp and cp.
    tp: int = 1
    cp: int = 1
    ep: int = 1
    data_parallel: str = ""  # ddp, fsdp
    sequence_parallel: bool = False
    context: str = "flex"  # or allgather, alltoall: how the ring attention passes keys and values on
    bucket_mib: float = 25.0
    reshard_after_forward: bool = True
    micro_batches: int = 1
    micro_batch: int = 2
    sequence: int = 64
    hidden: int = 64
    layers: int = 3
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 128
    vocab: int = 256
    experts: int = 0
    top_k: int = 1
    clip: bool = False
    mixed_precision: bool = False


class Recorder(TorchDispatchMode):
    """Collectives that are issued while it is on."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.phase = "forward"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes ops on local tensors, and collectives
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._record(name.strip("_"), args, result)
        if namespace == "cplib":  # of keys and of values; what is in it is not seen
            kind = "reduce_scatter" if name.endswith("backward") else "all_gather"
            for tensor in args[:2] if kind == "reduce_scatter" else result:
                self.add(kind, tensor.numel(), tensor.dtype, _ranks_of(args))
        return result

    def add(self, kind, elements, dtype, ranks):
        dtype = str(dtype).removeprefix("torch.")
        self.found.append({"phase": self.phase, "type": kind, "elements": elements, "dtype": dtype, "ranks": ranks})

    def _record(self, name, args, result):
        kinds = {
            "allreduce": "all_reduce",
            "all_reduce": "all_reduce",
            "allgather_base": "all_gather",
            "all_gather_into_tensor": "all_gather",
            "reduce_scatter_base": "reduce_scatter",
            "reduce_scatter_tensor": "reduce_scatter",
            "alltoall_base": "all_to_all",
            "all_to_all_single": "all_to_all",
            "broadcast": "broadcast",
        }
        if name in ("wait_tensor", "wrap_tensor_autograd"):
            return
        if name not in kinds:
            raise SystemExit(f"collective {name} is not known")
        tensors = [tensor for tensor in _flat((args, result)) if isinstance(tensor, torch.Tensor)]
        largest = max(tensors, key=torch.Tensor.numel)
        elements = sum(tensor.numel() for tensor in args[0]) if name == "allreduce" else largest.numel()
        self.add(kinds[name], elements, largest.dtype, _ranks_of(args))


def _flat(value):
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _ranks_of(args):
    for value in args:
        if isinstance(value, torch.ScriptObject):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(value))
        if isinstance(value, str):
            try:
                group = dist.distributed_c10d._resolve_process_group(value)
            except (RuntimeError, ValueError):  # the name of a reduction
                continue
            return dist.get_process_group_ranks(group)
    raise SystemExit(f"no process group among {args}")


class Inner(nn.Module):
    """The attention itself, on the heads and the part of the sequence that the rank has."""

    def forward(self, queries, keys, values):
        keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        return F.scaled_dot_product_attention(queries, keys, values)


class RingInner(nn.Module):
    """The same by the op for which PyTorch has a ring (it has kernels on GPUs only: tensors are on the meta device)."""

    def forward(self, queries, keys, values):
        return torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, True)[0]


class Attention(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.head_dim = options.hidden // options.heads
        self.wq = nn.Linear(options.hidden, options.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(options.hidden, options.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(options.hidden, options.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(options.heads * self.head_dim, options.hidden, bias=False)
        self.inner = RingInner() if options.cp > 1 and options.context != "flex" else Inner()

    def forward(self, x):
        batch, sequence = x.shape[0], x.shape[1]
        q, k, v = (
            projection(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2) for projection in (self.wq, self.wk, self.wv)
        )
        attended = self.inner(q, k, v)
        return self.wo(attended.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.w1 = nn.Linear(options.hidden, options.ffn, bias=False)
        self.w2 = nn.Linear(options.ffn, options.hidden, bias=False)
        self.w3 = nn.Linear(options.hidden, options.ffn, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """Tokens are sent to their experts and back by all-to-alls; every expert gets as many."""

    def __init__(self, options, group):
        super().__init__()
        self.options, self.group = options, group
        local = options.experts // options.ep
        self.router = nn.Linear(options.hidden, options.experts, bias=False)
        self.up = nn.Parameter(torch.randn(local, options.hidden, 2 * options.ffn) / 8)
        self.down = nn.Parameter(torch.randn(local, options.ffn, options.hidden) / 8)

    def forward(self, x):
        shape, top_k = x.shape, self.options.top_k
        scores = self.router(x).softmax(-1).flatten(0, 1)[:, :top_k]
        tokens = x.flatten(0, 1).repeat_interleave(top_k, dim=0)
        tokens = self._exchanged(tokens).view(self.up.shape[0], -1, shape[-1])
        gate, up = (tokens @ self.up).chunk(2, dim=-1)
        tokens = self._exchanged((F.silu(gate) * up @ self.down).flatten(0, 1))
        return (tokens.view(-1, top_k, shape[-1]) * scores.unsqueeze(-1)).sum(1).view(shape)

    def _exchanged(self, tokens):
        if self.options.ep == 1:
            return tokens
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        return all_to_all_single_autograd(tokens, None, None, self.group)


class Block(nn.Module):
    def __init__(self, options, group):
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.hidden)
        self.attention = Attention(options)
        self.ffn_norm = nn.RMSNorm(options.hidden)
        self.feed_forward = Experts(options, group) if options.experts else FeedForward(options)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self, options, group=None):
        super().__init__()
        self.tok_embeddings = nn.Embedding(options.vocab, options.hidden)
        self.layers = nn.ModuleList(Block(options, group) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.hidden)
        self.output = nn.Linear(options.hidden, options.vocab, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def tensor_parallel(model, mesh, options):
    """As torchtitan parallelises Llama; without sequence parallel the residual stream is whole on every rank."""
    stream = Shard(1) if options.sequence_parallel else Replicate()
    norm = {"norm": SequenceParallel()} if options.sequence_parallel else {}
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
            **norm,
        },
    )
    for layer in model.layers:
        plan = {
            "attention": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=stream),
            "feed_forward": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=stream),
            "feed_forward.w3": ColwiseParallel(),
        }
        if options.sequence_parallel:
            plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        parallelize_module(layer, mesh, plan)


def context_parallel(model, mesh, options):
    from torch.distributed.tensor.experimental import _attention

    flex = options.context == "flex"
    if not flex:
        _attention.set_rotate_method(options.context)
        _attention._enable_context_parallel_dispatcher()
    style = _attention._ContextParallel
    kind = style.AttentionType.FLEX if flex else style.AttentionType.SDPA
    for layer in model.layers:
        parallelize_module(layer.attention.inner, mesh, style(seq_dim=2, attention_type=kind))


def data_parallel(model, mesh, options, recorder):
    if options.data_parallel == "ddp":
        group = mesh.get_group("dp")
        model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=options.bucket_mib)

        def sum_of(_, bucket):  # in place of the all-reduce, whose result the fake group does not have
            buffer = bucket.buffer()
            recorder.add("all_reduce", buffer.numel(), buffer.dtype, dist.get_process_group_ranks(group))
            future = torch.futures.Future()
            future.set_result(buffer)
            return future

        model.register_comm_hook(None, sum_of)
    if options.data_parallel == "fsdp":
        names = ("replicate", "shard") if options.shard else ("dp",)
        policy = MixedPrecisionPolicy(
            **({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if options.mixed_precision else {})
        )
        how = {"mesh": mesh[names] if options.shard else mesh["dp"], "mp_policy": policy}
        fully_shard(model.tok_embeddings, reshard_after_forward=options.reshard_after_forward, **how)
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=options.reshard_after_forward, **how)
        fully_shard([model.norm, model.output], reshard_after_forward=False, **how)
        fully_shard(model, **how)
    return model


def mesh_of(options):
    """Ranks in the order of torchtitan: data parallel ones outside, tensor parallel ones inside; cp takes part in dp's group."""
    dp, cp, tp = options.dp, options.cp, options.tp
    dist.init_process_group("fake", rank=0, world_size=dp * cp * tp, store=FakeStore())
    if options.shard:
        return init_device_mesh("cpu", (dp * cp // options.shard, options.shard, tp), mesh_dim_names=("replicate", "shard", "tp"))
    if cp == 1:
        return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    mesh = init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=("rows", "cp", "tp"))
    mesh["rows", "cp"]._flatten("dp")
    return mesh


def collectives_of(options):
    """Those of the third step."""
    torch.manual_seed(0)
    mesh = mesh_of(options)
    experts = dist.new_group(list(range(options.ep))) if options.ep > 1 else None
    on_meta = options.cp > 1 and options.context != "flex"
    with torch.device("meta" if on_meta else "cpu"):
        model = Model(options, experts)
        tokens = torch.randint(options.vocab, (options.micro_batch, options.sequence // options.cp))
    if options.tp > 1:
        tensor_parallel(model, mesh["tp"], options)
    if options.cp > 1:
        context_parallel(model, mesh["cp"], options)
    recorder = Recorder()
    model = data_parallel(model, mesh, options, recorder)

    def loss_of(output):
        return F.cross_entropy(output.flatten(0, 1).float(), tokens.flatten())

    for _step in range(3):  # DDP takes its buckets in the order of the first step, and says so in the second
        recorder.found.clear()
        with recorder:
            for micro_batch in range(options.micro_batches):
                if options.data_parallel == "ddp":
                    model.require_backward_grad_sync = micro_batch == options.micro_batches - 1
                recorder.phase = "forward"
                output = model(tokens)
                if isinstance(output, DTensor):
                    with loss_parallel():
                        loss = loss_of(output)
                        recorder.phase = "backward"
                        loss.backward()
                else:
                    loss = loss_of(output)
                    recorder.phase = "backward"
                    loss.backward()
            recorder.phase = "optimizer"
            if options.clip:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
                norm.full_tensor() if isinstance(norm, DTensor) else norm
    return recorder.found


def main():
    """Each case in a process of its own, for a process group is made once in one; PyTorch is loaded once for all."""
    for number, options in enumerate(json.loads(sys.argv[1])):
        child = os.fork()
        if not child:
            Path(sys.argv[2], f"{number}.json").write_text(json.dumps(collectives_of(Options(**options))))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"{options} failed")


main()
