"""Splits a model over devices as a plan says. Copy beside `parallel_plan.json` and import it from the script:

    from parallel_plan import apply

    planned = apply(model, loss_function)         # after init_process_group; loss_function(outputs, targets) is a mean
    optimizer = torch.optim.AdamW(planned.parameters())
    for inputs, targets in loader:                # rank's own part of the batch: planned.data_rank of planned.data_ranks
        loss = planned.step(inputs, targets)      # forward and backward passes of all micro-batches; None: not on this stage
        planned.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()

The model has its layers in one ``nn.ModuleList`` or ``nn.ModuleDict``. What it needs to be split:

* tensor parallel: linear layers whose roles follow from their names (``ROLES``) or are given in `roles`; numbers of heads follow
  from shapes (``view(batch, sequence, -1, head_size)``);
* pipeline: a forward pass that skips modules which are None, as torchtitan's do: a stage has its own layers, the first one what is
  registered before them, the last one what is registered behind them.

Needs PyTorch 2.13, nothing else; another version is warned of, and tried.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROLES = {
    "column": (
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        "wq",
        "wk",
        "wv",
        "w1",
        "w3",
        "query",
        "key",
        "value",
        "fc1",
        "c_fc",
    ),
    "row": ("o_proj", "down_proj", "wo", "w2", "fc2", "out_proj", "c_proj"),
}
"""Names of linear layers of a layer whose outputs (column) or inputs (row) are split."""

_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
_TESTED = "2.13."


def apply(
    model: Any,
    loss_function: Callable[[Any, Any], Any],
    *,
    mesh: Any = None,
    roles: Mapping[str, str] | None = None,
    device: Any = None,
) -> Planned:
    """The plan's part of a model on this rank.

    Parameters
    ----------
    model
        The whole model, with equal values on all ranks (or on the meta device, and initialised afterwards). It is changed.
    loss_function
        Of outputs and targets; a mean over them.
    mesh
        A ``DeviceMesh`` with the axes pp, dp_replicate, dp_shard and tp; None: one over all ranks.
    roles
        Names of linear layers, as in a shell (``"layers.*.mix"``), with column, row or whole.
    device
        Of the ranks; None: the current accelerator, or the CPU.

    Raises
    ------
    ValueError
        The model, or the number of ranks, is not that of the plan.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    if not torch.__version__.startswith(_TESTED):
        warnings.warn(f"PyTorch {torch.__version__}: parallel_plan.py was tested with {_TESTED}x", stacklevel=2)
    plan = _plan()
    sizes = tuple(plan["degrees"][axis] for axis in _AXES)
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = (
            torch.device("cpu") if accelerator is None else torch.device(accelerator.type, torch.accelerator.current_device_index())
        )
    device = torch.device(device)
    if mesh is None:
        ranks = torch.distributed.get_world_size()
        if ranks != plan["ranks"]:
            raise ValueError(f"the plan is for {plan['ranks']} ranks, and there are {ranks}")
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=_AXES)
    mesh_sizes = tuple(mesh[axis].size() for axis in _AXES)
    if mesh_sizes != sizes:
        raise ValueError(f"the plan needs a mesh of {sizes} ranks over {_AXES}, not {mesh_sizes}")
    _used()
    path = _layers_path(model, plan["layers"])
    tied = _tied(model)
    if tied and sizes[0] > 1:
        raise ValueError(f"a pipeline needs a copy of {tied[0]} and {tied[1]}, which are one parameter: untie them")
    parts = [_stage_of(model, path, stage, plan) for stage in _own_stages(plan, mesh)] if sizes[0] > 1 else [model]
    for part in parts:
        if plan["degrees"]["tp"] > 1:
            _TensorParallel(part, path, mesh["tp"], plan["sequence_parallel"], roles or {}).apply()
            if tied:
                _module(part, tied[1]).weight = _module(part, tied[0]).weight
        if plan["recompute"]:
            _recompute(_module(part, path), plan["recompute_layers"], selective=plan.get("recompute_selective", False))
        _shard(part, path, mesh, plan, bool(tied))
    gc.collect()  # cycles hold parameters as they were before they were split: of an embedding whole gigabytes
    planned = Planned(parts, loss_function, mesh, plan, device)
    _observed(planned, path)
    return planned


class Planned:
    """A model that follows the plan.

    Attributes
    ----------
    parts
        The modules of this rank: the model, or its pipeline stages.
    mesh
        The ``DeviceMesh``, with the axes pp, dp_replicate, dp_shard and tp.
    data_rank, data_ranks
        Which part of the global batch this rank takes, of how many.
    sequences
        Of a part.
    """

    def __init__(self, parts: list[Any], loss_function: Callable[[Any, Any], Any], mesh: Any, plan: Mapping[str, Any], device: Any):
        self.parts, self.mesh, self._plan, self._device = parts, mesh, plan, device
        replicate, shard = mesh["dp_replicate"], mesh["dp_shard"]
        self.data_ranks = replicate.size() * shard.size()
        self.data_rank = replicate.get_local_rank() * shard.size() + shard.get_local_rank()
        self.sequences = plan["micro_batch"] * plan["micro_batches"]
        self._tp = mesh["tp"] if mesh["tp"].size() > 1 else None
        self._loss_function = loss_function
        self._schedule = _schedule(parts, self._loss, mesh["pp"], plan, device) if mesh["pp"].size() > 1 else None

    def parameters(self) -> Iterator[Any]:
        """Those of this rank, for the optimizer."""
        for part in self.parts:
            yield from part.parameters()

    def step(self, inputs: Any, targets: Any) -> Any:
        """Forward and backward passes of this rank's part of a batch; gradients are then means over the whole batch.

        Parameters
        ----------
        inputs, targets
            Of `sequences` sequences, on every rank of a pipeline.

        Returns
        -------
        Tensor or None
            The mean loss of this rank's part of the batch; None on ranks without the last stage.
        """
        with self._loss_context():
            return self._in_turn(inputs, targets) if self._schedule is None else self._pipelined(inputs, targets)

    def mean(self, loss: Any) -> float:
        """The loss of the whole batch, on every rank; `loss` is what `step` returned. Every rank calls it."""
        import torch

        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        if loss is not None:
            totals = torch.stack((loss.detach().double(), torch.ones((), dtype=torch.float64, device=self._device)))
        torch.distributed.all_reduce(totals)
        return float(totals[0] / totals[1])

    def clip_gradients(self, most: float) -> Any:
        """Scale all gradients so that their norm over all ranks is at most `most`; returns the norm before."""
        import torch
        from torch.distributed.tensor import DTensor

        groups: dict[Any, list[Any]] = {}
        parameters = [each for each in self.parameters() if each.grad is not None]
        for each in parameters:  # norms can be taken at once of gradients that are split alike
            groups.setdefault(each.grad.device_mesh if isinstance(each.grad, DTensor) else None, []).append(each.grad)
        square = torch.zeros((), device=self._device)
        for gradients in groups.values():
            norm = torch.nn.utils.get_total_norm(gradients)
            square += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        if self._schedule is not None:
            torch.distributed.all_reduce(square, group=self.mesh.get_group("pp"))
        norm = square.sqrt()
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        for each in parameters:
            (each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad).mul_(factor)
        return norm

    def _loss(self, outputs: Any, targets: Any) -> Any:
        from torch.distributed.tensor import DTensor, Shard

        if getattr(self.parts[-1], "_outputs_are_split", False) and not isinstance(outputs, DTensor):
            outputs = DTensor.from_local(outputs, self._tp, [Shard(-1)], run_check=False)
        loss = self._loss_function(outputs, targets)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def _loss_context(self) -> Any:
        from torch.distributed.tensor.parallel import loss_parallel

        return nullcontext() if self._tp is None else loss_parallel()

    def _in_turn(self, inputs: Any, targets: Any) -> Any:
        """Micro-batch by micro-batch."""
        (model,), count, stage = self.parts, self._plan["micro_batches"], self._plan["zero_stage"]
        total = None
        for number, (some, target) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True), 1):
            last = number == count
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last or stage >= 2)
            model.set_reshard_after_backward(last or stage == 3)
            loss = self._loss(model(some), target) / count
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        return total

    def _pipelined(self, inputs: Any, targets: Any) -> Any:
        import torch

        first = any(stage.is_first for stage in self._stages)
        last = any(stage.is_last for stage in self._stages)
        losses: list[Any] = []
        arguments = (inputs,) if first else ()
        schedule: Any = self._schedule
        if last:
            schedule.step(*arguments, target=targets, losses=losses)
        else:
            schedule.step(*arguments)
        return torch.stack(losses).mean() if last else None

    @property
    def _stages(self) -> list[Any]:
        schedule: Any = self._schedule
        return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def _plan() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    if content.get("version") != 1:
        raise ValueError(f"parallel_plan.json has version {content.get('version')}, and this file reads version 1")
    return content


def _used() -> None:
    """Tell `dpro-search validate` that the script follows the plan."""
    report = os.environ.get("DPRO_SEARCH_REPORT")
    if report:
        (Path(report) / "used-parallel_plan.py").touch()


def _observed(planned: Planned, layers_path: str) -> None:
    """Let an observer of `dpro-search` time the model's blocks, or pace them."""
    name, _, file = os.environ.get("DPRO_SEARCH_OBSERVER", "").partition(":")
    if name in ("timed", "paced"):
        importlib.import_module(f"dpro_search_{name}").observe(planned, layers_path, file)


# The model's structure.


def _layers_path(model: Any, count: int) -> str:
    """Name of the list of layers."""
    from torch import nn

    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) == count
    ]
    if len(lists) != 1:
        raise ValueError(
            f"the plan is for {count} layers in one nn.ModuleList or nn.ModuleDict, and the model has {len(lists)} such lists"
        )
    return str(lists[0])


def _module(model: Any, path: str) -> Any:
    return model.get_submodule(path)


def _around(model: Any, path: str) -> tuple[list[str], list[str]]:
    """Names of the modules with parameters that are registered before and behind the layers."""
    before: list[str] = []
    behind: list[str] = []
    parent, prefix = model, ""
    for word in path.split("."):
        names = before
        for name, child in parent.named_children():
            if name == word:
                names = behind
            elif any(True for _ in child.parameters()):
                names.append(prefix + name)
        parent, prefix = getattr(parent, word), f"{prefix}{word}."
    return before, behind


def _tied(model: Any) -> tuple[str, str] | None:
    """Two modules with one weight."""
    name_of_weight: dict[int, str] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "_parameters", {}).get("weight")
        if weight is not None and name_of_weight.setdefault(id(weight), name) != name:
            return name_of_weight[id(weight)], name
    return None


# Pipelines.


def _own_stages(plan: Mapping[str, Any], mesh: Any) -> list[int]:
    return list(plan["stages"][mesh["pp"].get_local_rank()])


def _stage_of(model: Any, path: str, stage: int, plan: Mapping[str, Any]) -> Any:
    """A copy of the model without what belongs to other stages."""
    from torch import nn

    counts = plan["stage_layers"]
    first = sum(counts[:stage])
    before, behind = _around(model, path)
    part = copy.deepcopy(model)
    layers = _module(part, path)
    layers_of_stage = range(first, first + counts[stage])
    if isinstance(layers, nn.ModuleDict):
        kept: Any = nn.ModuleDict({name: layer for number, (name, layer) in enumerate(layers.items()) if number in layers_of_stage})
    else:
        kept = nn.ModuleList([layer for number, layer in enumerate(layers) if number in layers_of_stage])
    _replace(part, path, kept)
    for name in (before if stage > 0 else []) + (behind if stage < len(counts) - 1 else []):
        _replace(part, name, None)
    return part


def _replace(model: Any, path: str, module: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(_module(model, parent) if parent else model, name, module)


def _schedule(parts: list[Any], loss: Callable[[Any, Any], Any], mesh: Any, plan: Mapping[str, Any], device: Any) -> Any:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    indices, count = plan["stages"][mesh.get_local_rank()], len(plan["stage_layers"])
    stages = [PipelineStage(part, index, count, device, group=mesh.get_group()) for part, index in zip(parts, indices, strict=True)]
    kind = get_schedule_class(plan["schedule"])
    scheduled = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(scheduled, n_microbatches=plan["micro_batches"], loss_fn=loss)


# Tensor parallelism.


class _TensorParallel:
    """Splits linear layers, embedding and head of a model over `mesh`; with `sequence` also norms and residuals, by position."""

    def __init__(self, model: Any, path: str, mesh: Any, sequence: bool, roles: Mapping[str, str]) -> None:
        from torch.distributed.tensor import Replicate, Shard

        self._model, self._path, self._mesh, self._sequence, self._roles = model, path, mesh, sequence, roles
        self._before, self._behind = _around(model, path)
        self._whole = Replicate()
        self._stream = Shard(1) if sequence else self._whole  # how residuals are split

    def apply(self) -> None:
        """Change the model in place."""
        from torch import nn
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            ParallelStyle,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        plan: dict[str, ParallelStyle] = {}
        parents: dict[str, Any] = {}
        for name, module in self._model.named_modules():
            if self._in(name, [self._path]):
                role = self._role(name, module)
                if role == "column":
                    plan[name] = ColwiseParallel()
                    parents[name.rpartition(".")[0]] = None
                elif role == "row":
                    plan[name] = RowwiseParallel(output_layouts=self._stream)
            elif isinstance(module, nn.Embedding) and self._in(name, self._before):
                if not any(isinstance(style, RowwiseParallel) for style in plan.values()):  # the first one: the vocabulary
                    plan[name] = RowwiseParallel(input_layouts=self._whole, output_layouts=self._stream)
                elif self._sequence:
                    self._split_positions(name, module)
            elif isinstance(module, nn.Linear) and self._in(name, self._behind):
                plan[name] = ColwiseParallel(input_layouts=self._stream)
                self._model._outputs_are_split = True
            if self._sequence and type(module).__name__.endswith("Norm"):
                plan[name] = SequenceParallel()
        parallelize_module(self._model, self._mesh, plan)
        for name in parents:
            self._gather_inputs(_module(self._model, name))

    def _in(self, name: str, places: list[str]) -> bool:
        return any(name == place or name.startswith(f"{place}.") for place in places)

    def _role(self, name: str, module: Any) -> str | None:
        from torch import nn

        for pattern, role in self._roles.items():
            if fnmatch(name, pattern):
                return role
        if not isinstance(module, nn.Linear):
            return None
        last = name.rpartition(".")[2]
        for role, names in ROLES.items():
            if last in names:
                return role
        raise ValueError(f"tensor parallel: is {name} column, row or whole? Say it in roles={{'{name}': ...}}")

    def _gather_inputs(self, module: Any) -> None:
        """Turn a module's input into one that is whole on every rank: its gradient is then summed once for all that read it."""
        from torch.distributed.tensor import DTensor

        def whole(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *others = inputs
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, self._mesh, [self._stream], run_check=False)
            return (first.redistribute(placements=[self._whole]), *others)

        module.register_forward_pre_hook(whole)

    def _split_positions(self, name: str, module: Any) -> None:
        """Make each rank use the rows of a table of positions that belong to its part of the sequence."""
        from torch.distributed.tensor import DTensor, Shard, distribute_module

        def own(_: Any, inputs: Any, outputs: Any) -> Any:
            whole = (
                outputs if isinstance(outputs, DTensor) else DTensor.from_local(outputs, self._mesh, [self._whole], run_check=False)
            )
            return whole.redistribute(placements=[Shard(whole.ndim - 2)]).to_local()

        def as_whole(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (DTensor.from_local(inputs[0], self._mesh, [self._whole], run_check=False),)

        distribute_module(module, self._mesh)
        module.register_forward_pre_hook(as_whole)
        module.register_forward_hook(own)


# Recomputation and data parallelism.


def _recompute(layers: Any, most: int, *, selective: bool) -> None:
    """Keep of each of the first `most` layers (0: of all) its input only, or beside it what `_kept_ops` says."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    more = {"context_fn": lambda: create_selective_checkpoint_contexts(_kept_ops())} if selective else {}
    for name, layer in list(layers.named_children())[: most or None]:
        layers.register_module(name, checkpoint_wrapper(layer, **more))


def _kept_ops() -> Callable[..., Any]:
    """A policy for one pass through a layer: the outputs of every second matmul, of attention and of reduce-scatters are kept."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    matmuls = Counter[bool]()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        name = op.name()
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            matmuls[context.is_recompute] += 1
            kept = matmuls[context.is_recompute] % 2 == 1
        else:
            kept = "scaled_dot_product" in name or "reduce_scatter_tensor" in name
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _shard(model: Any, path: str, mesh: Any, plan: Mapping[str, Any], tied: bool) -> None:
    """``fully_shard`` each layer, what is before and behind them, and the rest; over one rank where ZeRO splits nothing."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh["dp_replicate", "dp_shard"]}
    if mesh["dp_replicate"].size() == 1:
        options["mesh"] = mesh["dp_shard"]
    if plan["parameter_dtype"] != "float32":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=getattr(torch, plan["parameter_dtype"]), reduce_dtype=getattr(torch, plan["reduce_dtype"])
        )
    freed = plan["reshard_after_forward"]
    before, behind = _around(model, path)
    if not tied:  # else they stay with the root
        for name in before:
            fully_shard(_module(model, name), reshard_after_forward=freed, **options)
    for layer in _module(model, path).children():
        fully_shard(layer, reshard_after_forward=freed, **options)
    if behind and not tied:  # the backward pass begins with them: they are not freed before
        fully_shard([_module(model, name) for name in behind], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
