"""`rank_memories`, `peak_memory`: what ranks hold when they hold most, by category.

A rank holds most at the end of a forward pass (the loss's on the last stage), with the activations of all micro-batches that its
stages have in flight; or, with few activations, in the optimizer's step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from dpro_search.parallel.costs.pricer import Pricer
from dpro_search.parallel.memory.kept import Kept
from dpro_search.parallel.model import Block
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.strategy import Recompute, key_without
from dpro_search.parallel.workload import SharedResults, Workload, ranks_of, recomputed, stages_of

CONTEXT_BYTES = 1.05 * 2**30
"""Memory that the driver holds back (0.55 GiB of an H100: 79.1 GiB of nvidia-smi's 79.65), and a process's context and kernels."""
_LAYERS_MOVING = 2
"""Layers whose activations are on the device though they wait on the host: one that computes, one whose copies are on their way."""
GRAPH_ACTIVATIONS = 0.2
"""Share of the activations of layers that CUDA graphs of them keep allocated beside: temporaries, inputs and outputs at fixed
addresses (NVIDIA NeMo, docs/source/features/optimizations/cudagraphs.md: about 20 %). Of layers with experts, whose graphs have
attention alone, it is not known, and nothing is added."""
CHANNELS = 16
CHANNEL_BYTES = 2 * 10 * 2**20
"""Buffers of a channel of an NCCL communicator, to send and to receive: 4 MiB and less for each protocol (`NCCL_BUFFSIZE`)."""
_IRRELEVANT_TO_ACTIVATIONS = frozenset(
    ("dp", "global_batch", "zero_stage", "dp_replicate", "reshard", "prefetch_layers", "gradient_dtype", "offload_optimizer")
)
"""Settings of a strategy that change nothing about the activations of its passes, beside the number of micro-batches."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Bytes on a rank when it holds most, by category."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float  # Of all micro-batches in flight, and what is computed again.
    logits_bytes: float  # The logits, their copy for the loss, and the gradient.
    gathered_bytes: float  # Parameters and gradients of layers that are gathered for a while (ZeRO-3), or in the optimizer's step.
    buckets_bytes: float = 0.0  # Of gradients that are reduced, beside the gradients.
    workspace_bytes: float = 0.0  # Of matmul libraries.
    fragments_bytes: float = 0.0  # Of the allocator: blocks that are cut up when a tensor of their size is asked for.
    cached_bytes: float = 0.0  # Of the allocator: what it has, does not use, and gives back when memory is short.
    context_bytes: float = 0.0  # Of the driver and of NCCL, outside the allocator.
    offloaded: float = 0.0  # In the host's memory, in place of the device's.

    @property
    def allocated_bytes(self) -> float:
        """Memory of tensors: `torch.cuda.max_memory_allocated`."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.gathered_bytes
            + self.buckets_bytes
            + self.workspace_bytes
        )

    @property
    def reserved_bytes(self) -> float:
        """Memory that the allocator holds: `torch.cuda.max_memory_reserved`."""
        return self.allocated_bytes + self.fragments_bytes + self.cached_bytes

    @property
    def total_bytes(self) -> float:
        """Memory that a device shows and must have.

        The allocator gives cached blocks back rather than fail, but jobs that need them to be given back in every step mostly do
        fail (experiments/truth, out-of-memory rows).
        """
        return self.reserved_bytes + self.context_bytes

    def reserved_within(self, limit_bytes: float) -> float:
        """Memory that the allocator holds on a device. It returns cached blocks rather than fail."""
        fits = self.reserved_bytes + self.context_bytes <= limit_bytes
        return self.reserved_bytes if fits else self.reserved_bytes - self.cached_bytes


def peak_memory(workload: Workload, known: SharedResults | None = None) -> PeakMemory:
    """Peak memory of the pipeline rank that needs most."""
    return max(rank_memories(workload, known), key=lambda memory: memory.total_bytes)


def rank_memories(workload: Workload, known: SharedResults | None = None) -> tuple[PeakMemory, ...]:
    """Peak memory of each pipeline rank, in the order of stages."""
    return tuple(_Ledger(workload, known).memories())


def fits(workload: Workload, limit_bytes: float, known: SharedResults | None = None) -> bool:
    """Whether no pipeline rank needs more than a limit. The first that does answers it, which spares the others."""
    return all(memory.total_bytes <= limit_bytes for memory in _Ledger(workload, known).memories())


def mean_state_bytes(workload: Workload, known: SharedResults | None = None) -> float:
    """Weights, gradients and optimizer state of a rank, the mean of all pipeline ranks: some rank needs no less than that."""
    return _Ledger(workload, known).mean_state_bytes()


@lru_cache(maxsize=64)  # a search asks for the same few schedules again and again
def _steps(schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> tuple[tuple[tuple[bool, int], ...], ...]:
    """The passes of each rank that take or give back memory, in their order: whether one is a forward pass, and its stage.

    The pass that makes only the gradients of a stage's inputs (I) is left out: those of the weights need all that it needs.
    """
    orders = pipeline_orders(schedule, ranks, stages_per_rank, micro_batches)
    return tuple(tuple((done.direction == "F", done.stage) for done in order if done.direction != "I") for order in orders)


class _StageMemory(NamedTuple):
    """Bytes of one micro-batch of a stage."""

    held_bytes: float  # From its forward to its backward pass.
    again_bytes: float  # Beside them, in its backward pass.
    logits_bytes: float
    layers: int


class _Ledger:
    def __init__(self, workload: Workload, known: SharedResults | None) -> None:
        self._known = known = known or SharedResults()
        self._workload, self._pricer = workload, Pricer(workload, known)
        self._plan, self._rules = workload.strategy, workload.runtime.memory
        self._stages, self._on_ranks = stages_of(workload, known), ranks_of(workload, known)
        self._kept: dict[str, Kept] = {}
        self._of_stages: dict[int, _StageMemory] = {}

    def memories(self) -> Iterator[PeakMemory]:
        plan = self._plan
        ranks = _steps(plan.schedule, plan.pp, plan.virtual_stages, plan.micro_batches)
        held = self._known.held.setdefault((key_without(plan, _IRRELEVANT_TO_ACTIVATIONS), plan.micro_batches), {})
        for rank, steps in enumerate(ranks):
            if rank not in held:
                held[rank] = self._passes(steps)
            yield self._of_rank(rank, *held[rank])

    def mean_state_bytes(self) -> float:
        states = self._states(tuple(block for blocks in self._on_ranks for block in blocks))
        return (states.weights_bytes + states.gradients_bytes + states.optimizer_bytes) / self._plan.pp

    def _of(self, block: Block) -> Kept:
        if block.name not in self._kept:
            self._kept[block.name] = self._pricer.kept(block)
        return self._kept[block.name]

    def _of_rank(self, rank: int, activations: float, logits: float, in_flight: int) -> PeakMemory:
        blocks = self._on_ranks[rank]
        states, workspace = self._states(blocks), self._workspace_bytes(blocks)
        if self._plan.cuda_graphs and not any(block.top_k for block in blocks):
            activations *= 1 + GRAPH_ACTIVATIONS
        gathered = self._gathered_bytes(blocks)
        activations += self._deferred_bytes(blocks)
        step, part = self._step_bytes(states), self._part_bytes(states)
        passing = states.weights_bytes / self._workload.element_bytes * self._rules.pass_gradient_bytes
        held, later = activations + logits + gathered, max(step, passing, part)
        early = self._rules.drops_gradients and self._plan.micro_batches == 1 and self._plan.zero_stage < 3
        absent = states.gradients_bytes if early else 0.0  # while activations are most
        in_update = later + absent > held  # the optimizer's step holds most
        largest = max((self._of(block).largest_bytes for block in self._distinct(blocks)), default=0.0)
        fragments = largest if self._plan.micro_batches > 1 else 0.0
        # Blocks of activations stay cached in the optimizer's step, whose largest temporaries do not fit in them.
        cached = held + self._waiting_bytes(blocks, in_flight, fragments) + part + self._unfit_bytes(step, largest)
        return replace(
            states,
            gradients_bytes=0.0 if early and not in_update else states.gradients_bytes,
            activations_bytes=0.0 if in_update else activations,
            logits_bytes=0.0 if in_update else logits,
            gathered_bytes=later if in_update else gathered,
            workspace_bytes=workspace,
            fragments_bytes=fragments,
            cached_bytes=max(cached - max(held, later), 0.0),
            offloaded=states.offloaded + self._moved_bytes(blocks) * in_flight,
        )

    @staticmethod
    def _distinct(blocks: tuple[Block, ...]) -> Collection[Block]:
        """One block of each name: equal layers need the same."""
        return {block.name: block for block in blocks}.values()

    def _moved_bytes(self, blocks: tuple[Block, ...]) -> float:
        """Bytes that a layer keeps on the host for a micro-batch, the mean of all layers."""
        if not self._plan.offload_activations:
            return 0.0
        flags = recomputed(self._plan, blocks)
        held = [
            self._of(block).held_bytes(self._plan.recompute if again else Recompute.NONE)
            for block, again in zip(blocks, flags, strict=True)
            if self._moves(block)
        ]
        return sum(held) / len(held) if held else 0.0

    def _deferred_bytes(self, blocks: tuple[Block, ...]) -> float:
        """Gradients of the logits that wait for the end of the step."""
        waiting = min(self._rules.deferred_logits, self._plan.micro_batches)
        if not waiting:
            return 0.0
        logits = sum(self._of(block).logits_bytes for block in blocks) / self._rules.logits_bytes
        return waiting * logits * self._workload.element_bytes

    def _states(self, blocks: tuple[Block, ...]) -> PeakMemory:
        """Memory that stays allocated as long as the job runs."""
        plan, runtime, rules = self._plan, self._workload.runtime, self._rules
        held = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
        whole = 0.0
        counts = Counter(block.name for block in blocks)
        splits_gradients = plan.zero_stage >= 2 and not self._workload.reduces_once
        for block in self._distinct(blocks):
            for (expert, trained, fixed), each in self._held_elements(block).items():
                elements = each * counts[block.name]
                ways = plan.expert_zero_ways if expert else plan.zero_ways
                element = self._fixed_bytes(block) if fixed else self._workload.element_bytes
                if trained and rules.layer_weight_bytes and block.name.startswith("layer"):
                    element = rules.layer_weight_bytes
                held["weights"] += elements * element / (ways if plan.zero_stage == 3 else 1)
                if trained:
                    whole += elements
                    held["gradients"] += elements * self._workload.gradient_bytes / (ways if splits_gradients else 1)
                    held["gradients"] += elements * rules.kept_gradient_bytes
                    held["optimizer"] += elements * runtime.optimizer_bytes / (ways if plan.zero_stage >= 1 else 1)
        places = {
            "optimizer": True,
            "gradients": runtime.host_gradients and splits_gradients,
            "weights": runtime.host_parameters and plan.zero_stage == 3,
        }
        moved = [name for name, on_host in places.items() if on_host]
        offloaded = sum(held[name] for name in moved) if plan.offload_optimizer else 0.0
        if plan.offload_optimizer:
            held |= dict.fromkeys(moved, 0.0)
        flat = min(whole, rules.flat_elements) * 2 * self._workload.element_bytes
        communicators = sum(degree > 1 for degree in (plan.dp * plan.cp, plan.tp, plan.pp, plan.cp, plan.ep))
        return PeakMemory(
            weights_bytes=held["weights"],
            gradients_bytes=held["gradients"],
            optimizer_bytes=held["optimizer"],
            offloaded=offloaded,
            activations_bytes=0.0,
            logits_bytes=0.0,
            gathered_bytes=0.0,
            buckets_bytes=flat + (whole * rules.bucket_bytes if plan.dp * plan.cp > 1 and not plan.zero_stage else 0.0),
            context_bytes=CONTEXT_BYTES + communicators * CHANNELS * CHANNEL_BYTES,
        )

    def _workspace_bytes(self, blocks: tuple[Block, ...]) -> float:
        """Workspace of matmul libraries, and buffers that layers share for scores and in place of gradients of weights."""
        rules, kept = self._rules, [self._of(block) for block in self._distinct(blocks)]
        experts = any(block.top_k for block in blocks)
        shapes = frozenset[tuple[float, float]]().union(*(each.weight_shapes for each in kept))
        has_dummies = rules.transformer_engine and rules.dummy_gradients
        dummies = sum(rows * columns for rows, columns in shapes) if has_dummies else 0.0
        shared = max((each.shared_bytes for each in kept), default=0.0)
        workspace_bytes = rules.workspace_bytes(self._workload.cluster.groups[0].host.device, experts=experts)
        gathers = rules.gather_buffers * max((each.gathered_bytes for each in kept), default=0.0)
        return workspace_bytes + shared + gathers + (dummies + self._unpacked_elements(blocks)) * self._workload.element_bytes

    def _unpacked_elements(self, blocks: tuple[Block, ...]) -> float:
        """Elements of the largest quantized weight, which its product has as a matrix in 16 bits (`Pricer._unpacked_us`)."""
        if not 0 < self._workload.frozen_bytes < self._workload.product_bytes:
            return 0.0
        programs = {block.name: self._pricer.program(block) for block in blocks if block.name.startswith("layer")}
        return max((weight.elements for each in programs.values() for weight in each.weights if weight.fixed), default=0.0)

    def _held_elements(self, block: Block) -> dict[tuple[bool, bool, bool], float]:
        """Parameters of a block, by whether they are experts', have gradients and optimizer state, and are fixed (LoRA)."""
        key = block.name, self._pricer.split
        if key not in self._known.parameters:
            elements: dict[tuple[bool, bool, bool], float] = defaultdict(float)
            for weight in self._pricer.program(block).weights:
                elements[weight.expert, weight.trained, weight.fixed] += weight.elements
            self._known.parameters[key] = dict(elements)
        return self._known.parameters[key]

    def _passes(self, steps: tuple[tuple[bool, int], ...]) -> tuple[float, float, int]:
        """Activations and logits when a rank holds most of both, and the layers then in flight; `steps` as `_steps` has them."""
        stages = {number: self._stage(number) for number in {number for _, number in steps}}
        beside = {number: max(stage.logits_bytes, stage.again_bytes) for number, stage in stages.items()}
        held, flying, best, most = 0.0, 0, (0.0, 0.0, 0), 0.0
        for forward, number in steps:
            held_bytes, again, logits, layers = stages[number]
            if not forward:
                held, flying = held - held_bytes, flying - layers
                continue
            held, flying = held + held_bytes, flying + layers
            if held + beside[number] > most:
                best = (held + again, logits, flying) if again > logits else (held, logits, flying)
                most = best[0] + best[1]
        return best

    def _stage(self, number: int) -> _StageMemory:
        """Memory of a micro-batch of a stage."""
        if number not in self._of_stages:
            blocks = self._stages[number]
            kept = [(self._of(block), again) for block, again in zip(blocks, recomputed(self._plan, blocks), strict=True)]
            held = [each.held_bytes(self._plan.recompute if again else Recompute.NONE) for each, again in kept]
            moved = [size for size, block in zip(held, blocks, strict=True) if self._moves(block)]
            sent = self._rules.keeps_outputs and number < len(self._stages) - 1
            self._of_stages[number] = _StageMemory(
                held_bytes=sum(held) - sum(moved) + sent * kept[-1][0].input_bytes,
                again_bytes=max((self._again_bytes(each, again) for each, again in kept), default=0.0)
                + _LAYERS_MOVING * max(moved, default=0.0),
                logits_bytes=sum(each.logits_bytes for each, _ in kept),
                layers=sum(block.name.startswith("layer") for block in blocks),
            )
        return self._of_stages[number]

    def _moves(self, block: Block) -> bool:
        """Whether what a block keeps waits on the host for its backward pass."""
        return self._plan.offload_activations and block.name.startswith("layer")

    def _again_bytes(self, kept: Kept, again: bool) -> float:
        """Temporary memory of the backward pass of a block: gradients, and activations that it recomputes."""
        if not again:
            return kept.transient_bytes
        left = 0.0 if self._plan.recompute is Recompute.FULL else kept.selective_bytes
        return kept.transient_bytes + kept.scores_bytes + max(kept.activations_bytes - left, 0.0)

    def _gathered_bytes(self, blocks: tuple[Block, ...]) -> float:
        """Parameters of the layers that compute and are gathered ahead, or of all that are kept, and gradients of one (ZeRO-3)."""
        if self._plan.zero_stage < 3:
            return 0.0
        held = [self._held_elements(block) for block in blocks]
        trained = max((sum(size for (_, each, _), size in block.items() if each) for block in held), default=0.0)
        whole = [
            sum(size * (self._fixed_bytes(block) if fixed else self._workload.element_bytes) for (*_, fixed), size in each.items())
            for block, each in zip(blocks, held, strict=True)
        ] or [0.0]
        gathered = max(whole) * (1 + self._plan.prefetch_layers) if self._plan.reshard else sum(whole)
        return gathered + trained * self._workload.gradient_bytes

    def _fixed_bytes(self, block: Block) -> float:
        """Bytes of an element of a block's weights that are not trained."""
        quantized = self._workload.frozen_bytes if block.name.startswith("layer") else 0.0
        return quantized or self._workload.product_bytes

    def _step_bytes(self, states: PeakMemory) -> float:
        """Temporaries of the optimizer's step."""
        if self._plan.zero_stage not in (1, 2) or self._plan.dp * self._plan.cp == 1:
            return 0.0
        return states.weights_bytes / self._workload.element_bytes * self._rules.step_bytes

    def _part_bytes(self, states: PeakMemory) -> float:
        """Copies of the gradients of a rank's part in the optimizer's step."""
        if self._plan.zero_stage not in (1, 2):
            return 0.0
        return states.weights_bytes / self._workload.element_bytes / self._plan.zero_ways * self._rules.part_bytes

    def _waiting_bytes(self, blocks: tuple[Block, ...], flying: int, fragments: float) -> float:
        """Buffers of collectives that the device has not run yet.

        With several micro-batches in turn a forward pass starts while those of the backward pass before it wait; what they displace
        is among the fragments.
        """
        layers = [self._of(block) for block in self._distinct(blocks) if block.name.startswith("layer")]
        forward_ahead, backward_ahead = (self._layers_ahead(blocks, flying, backward=backward) for backward in (False, True))
        forward = max((kept.forward_sent_bytes for kept in layers), default=0.0) * forward_ahead
        backward = max((kept.backward_sent_bytes for kept in layers), default=0.0) * backward_ahead
        return forward + (max(backward - fragments, 0.0) if self._plan.micro_batches > 1 else 0.0)

    def _layers_ahead(self, blocks: tuple[Block, ...], flying: int, *, backward: bool) -> float:
        """Layers whose collectives the host has launched and the device has not run, at most at any time of a run.

        Ranks wait for each other on their devices: the host of one runs ahead, until CUDA's queue is full, whenever another one is
        late. Where each collective is checked first, hosts wait for each other. Then the host is ahead by what the device takes
        longer since the last message that it waited for (with the gradients of a micro-batch, one backward and one forward pass
        before), and by the forward passes behind messages that the next stage has not taken yet. Those are all but two of those
        that start a step. Empirical (nanotron on H100, 2 to 16 stages).
        """
        layers = [block for block in blocks if block.name.startswith("layer")]
        if not self._rules.layers_ahead or not layers:
            return 0.0
        most = min(self._rules.layers_ahead, len(layers) if backward else flying)
        if not self._workload.runtime.host.check_rank_us:
            return most
        (device_us, host_us), (late_us, late_host_us) = (self._pricer.paces(layers[0], backward=late) for late in (False, True))
        gained_us = len(layers) * max(late_us - late_host_us, 0.0)
        if backward:
            return min(gained_us / late_us, most)
        gained_us = max(gained_us + len(layers) * (device_us - host_us), flying * (device_us - host_us), 0.0)
        return max(min(gained_us / device_us, most), flying - 2 * len(layers))

    def _unfit_bytes(self, step: float, largest: float) -> float:
        """Temporaries of the optimizer's step for which no cached block is large enough: each rank's part, and their sum."""
        ways = self._plan.dp * self._plan.cp
        return step if step / 2 / ways > largest else step / 2 if step / 2 > largest else 0.0
