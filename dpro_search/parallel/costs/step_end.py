"""`StepEnd`: time of what follows the last backward pass of a step: sums of shared gradients, and the optimizer's update."""

from __future__ import annotations

from dpro_search.collect.trace import CollectiveKind
from dpro_search.errors import InputError
from dpro_search.parallel.costs.exchange import shared_elements
from dpro_search.parallel.costs.pricer import Pricer
from dpro_search.parallel.model import Block
from dpro_search.parallel.workload import SharedResults, Workload, copies_embedding, ranks_of, stages_of

ADAM_PASSES_BYTES = 30.0
"""Read and written by Adam for each parameter: gradient (4), two moments and the fp32 parameter twice (24), the parameter (2)."""
NO_HOST_RATE = "how fast the host's memory is is not known: give the cluster's file host_memory_rate"
HOST_ADAM_SHARE = 0.45
"""Share of the rate of the host's memory that an update on its processors reaches with `ADAM_PASSES_BYTES`: 2.57 s for 10 billion
parameters on a DGX-2 with 256 GB/s (Ren et al. 2021, "ZeRO-Offload", table 4, CPU-Adam)."""


class StepEnd:
    """Costs of a step behind its passes, whose exchanges and copies a pricer of blocks prices."""

    def __init__(self, workload: Workload, known: SharedResults, pricer: Pricer) -> None:
        self._workload, self._known, self._pricer = workload, known, pricer

    def shared_us(self) -> float:
        """At the end of a step, the sum of gradients of which tensor parallel ranks have parts, on the rank that has most."""
        if not self._workload.strategy.sequence_parallel:
            return 0.0
        ranks = ranks_of(self._workload, self._known)
        distinct = {block.name: block for blocks in ranks for block in blocks}
        shared = {name: shared_elements(self._pricer.program(block)) for name, block in distinct.items()}
        most = max(sum(shared[block.name] for block in blocks) for blocks in ranks)
        if not most:
            return 0.0
        return self._pricer.exchanged_us(CollectiveKind.ALL_REDUCE, most * self._workload.gradient_bytes, "tp")

    def tied_us(self) -> float:
        """At the end of a step, the sum of the gradients of both copies of an embedding."""
        if not copies_embedding(self._workload) or self._workload.frozen:
            return 0.0
        embedding = self._pricer.program(stages_of(self._workload, self._known)[0][0])
        elements = next(weight.tensors[0] for weight in embedding.weights if weight.op == "tokens")
        return self._pricer.exchanged_us(
            CollectiveKind.ALL_REDUCE, elements * self._workload.gradient_bytes, "first and last stage"
        )

    def copies_us(self) -> float:
        """At the end of a step, the sum of the gradients of both copies of a stage, on the rank that has most (DualPipe)."""
        if self._workload.strategy.copies == 1:
            return 0.0
        most = max(
            sum(self._pricer.shard_elements(self._pricer.program(block), 0.0) for block in blocks)
            for blocks in ranks_of(self._workload, self._known)
        )
        return self._pricer.exchanged_us(CollectiveKind.ALL_REDUCE, most * self._workload.gradient_bytes, "first and last stage")

    def norm_us(self) -> float:
        """Before the update, the sum over all ranks of the squares of gradients: one number."""
        if not self._workload.runtime.clip_gradients:
            return 0.0
        return self._pricer.exchanged_us(CollectiveKind.ALL_REDUCE, 4.0, "world")

    def update_us(self, blocks: tuple[Block, ...]) -> float:
        """The optimizer's work for some blocks on one rank."""
        held_bytes: dict[str, tuple[float, int]] = {}
        held_elements: dict[str, float] = {}
        for block in {block.name: block for block in blocks}.values():  # equal blocks hold as much
            weights = [weight for weight in self._pricer.program(block).weights if weight.trained]
            held = self._pricer.shard_elements(self._pricer.program(block), 0.0)
            held_bytes[block.name] = held * ADAM_PASSES_BYTES, len(weights)
            held_elements[block.name] = held
        if self._workload.times is not None and self._workload.times.times.updates:
            fixed_us, each_us = self._workload.times.update
            return self._workload.scales.compute * (fixed_us + each_us * sum(held_elements[block.name] for block in blocks))
        if self._workload.strategy.offload_optimizer:
            return self._host_update_us(sum(held_elements[block.name] for block in blocks))
        moved_us = self._pricer.moved_us(sum(held_bytes[block.name][0] for block in blocks))
        tensors = sum(held_bytes[block.name][1] for block in blocks)
        host_us = self._workload.scales.host * tensors * self._workload.runtime.host.parameter_us
        return max(moved_us, host_us)

    def _host_update_us(self, count: float) -> float:
        """Time of the update of some parameters on the host, whose devices share its memory's rate.

        What does not live there is copied before and behind it, gradients as they are summed and parameters in 16 bits.
        """
        workload = self._workload
        host = workload.cluster.groups[0].host
        if host.memory_bytes_per_s is None:
            raise InputError(NO_HOST_RATE)
        ranks = min(host.devices, workload.strategy.devices)
        update_us = ranks * count * ADAM_PASSES_BYTES / (host.memory_bytes_per_s * HOST_ADAM_SHARE) * 1e6
        if workload.runtime.host_parameters and self._workload.strategy.zero_stage == 3:
            return update_us
        return update_us + self._pricer.copied_us(count * (workload.gradient_bytes + workload.element_bytes))
