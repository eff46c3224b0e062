"""When the modules of a recorded PyTorch model ran, on each rank, and what their forward passes keep for the backward pass.

A forward operator and its backward function have one number, and numbers rise through a forward pass: those between a module's
start and its end are its own. Checkpointing runs a forward pass again up to the last tensor that the backward pass is to have, so
that an operator at the end which saves its inputs only, or nothing, does not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from dpro_search.collect.assemble.common import step_of
from dpro_search.collect.assemble.torch.autocast import Lowering, ModuleRows, lowered_ops, lowering
from dpro_search.collect.assemble.torch.execution import ExecutionNode, ExecutionTrace
from dpro_search.collect.assemble.torch.files import RawRank
from dpro_search.collect.assemble.torch.host_spans import HostSpans
from dpro_search.collect.assemble.torch.spans import MODULE, inside
from dpro_search.collect.modules import LoweredOps, ModuleCalls, ModuleInfo
from dpro_search.collect.recorded_names import AUTOGRAD_FUNCTION, ENQUEUE
from dpro_search.collect.trace import Ints, Steps

# Backward functions, without "Backward" and what follows it.
_SAVE_NOTHING = frozenset([
    "Add", "Alias", "AsStrided", "Cat", "Chunk", "Clone", "Expand", "Mean", "Neg", "Permute", "ReshapeAlias", "Select", "Slice",
    "Split", "Squeeze", "Stack", "Sub", "Sum", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
])  # fmt: skip
_SAVE_INPUTS = frozenset([
    "AdaptiveAvgPool2D", "Addmm", "AvgPool2D", "Baddbmm", "Bmm", "Convolution", "Div", "Embedding", "Gelu", "Mm", "Mul", "Silu",
])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A forward pass of a module: times of the profile's clock, and the numbers of its backward functions, `low` up to `high`."""

    module: int
    step: int
    start_us: float
    end_us: float
    again_us: float
    backward_us: float
    backward_end_us: float
    low: int
    high: int
    communicates: bool
    rows: ModuleRows


class RankModules:
    """The modules of one rank."""

    def __init__(self, rank: RawRank, number: int, base_ns: int, steps: Steps) -> None:
        self._rank, self._number = rank, number
        self._shift_us = (rank.origin_ns - base_ns) / 1e3
        self.calls = _calls(rank, number, self._shift_us, steps)

    def columns(self) -> list[tuple[int, int, int, float, float, float, float, float]]:
        """Rows of `ModuleCalls`."""
        shift_us = self._shift_us
        return [
            (
                *(call.module, self._number, call.step),
                *(call.start_us + shift_us, call.again_us + shift_us, call.end_us + shift_us),
                *(call.backward_us + shift_us, call.backward_end_us + shift_us),
            )
            for call in self.calls
        ]

    def kept_bytes(self) -> dict[int, tuple[int, int]]:
        """`frees_bytes` and `behind_bytes` of modules by their number; empty without an execution trace."""
        if self._rank.execution is None:
            return {}
        kept, bytes_of_module = _kept(self._rank.execution, self._rank.spans), {}
        for call in self.calls:
            if not kept or call.backward_us < kept[0].made_us:
                continue  # of a step before that of the execution trace
            freed = sum(buffer.size_bytes for buffer in kept if buffer.is_only_of(call))
            after = sum(buffer.size_bytes for buffer in kept if buffer.made_us >= call.start_us)
            bytes_of_module[call.module] = freed, after - freed
        return bytes_of_module

    def lowered(self) -> dict[int, LoweredOps]:
        """Ops of modules that would run in bfloat16, by the module's number; empty without an execution trace."""
        ops_of_module = {}
        for number, (executed, lowers) in self.lowerings().items():
            calls = [call.rows for call in self.calls if call.module == number]
            ops_of_module[number] = lowered_ops(self._rank.spans, calls, executed, lowers)
        return ops_of_module

    def lowerings(self) -> dict[int, tuple[ModuleRows, Lowering]]:
        """The forward pass of each module that the execution trace has, and what autocast would do to it, by its number."""
        if self._rank.execution is None:
            return {}
        nodes, lowering_of_module = _forward_nodes(self._rank.execution, self._rank.spans), {}
        place = {row: i for i, row in enumerate(nodes)}
        for call in self.calls:
            if not len(call.rows.ops) or not place.keys() >= set(call.rows.ops.tolist()):
                continue  # of another step
            lowers = lowering(self._rank.spans, call.rows, list(nodes.values()), place[int(call.rows.ops[0])])
            if lowers is not None:
                lowering_of_module[call.module] = call.rows, lowers
        return lowering_of_module


def modules_of(ranks: Sequence[RawRank], base_ns: int, steps: Steps) -> tuple[tuple[ModuleInfo, ...], ModuleCalls]:
    """The modules of a job, in the order in which they run, and their calls; none where they were not recorded."""
    listed = ranks[0].hook.modules or []
    if any(rank.hook.modules != listed for rank in ranks):
        return (), ModuleCalls.none()
    parts = [RankModules(rank, number, base_ns, steps) for number, rank in enumerate(ranks)]
    kept, lowered = parts[0].kept_bytes(), parts[0].lowered()
    infos = []
    for number, module in enumerate(listed):
        frees, behind = kept.get(number, (-1, -1))
        refusal = _refusal([[call for call in part.calls if call.module == number] for part in parts])
        infos.append(
            ModuleInfo(
                name=module.name,
                type=module.type,
                member=module.member,
                frees_bytes=frees,
                behind_bytes=behind,
                refusal=refusal,
                lowered=lowered.get(number),
            )
        )
    first_us = {call.module: call.start_us for call in reversed(parts[0].calls)}
    order = sorted(range(len(infos)), key=lambda number: (first_us.get(number, np.inf), number))
    place = {number: i for i, number in enumerate(order)}
    rows = [(place[module], *row) for part in parts for module, *row in part.columns() if not infos[module].refusal]
    calls = ModuleCalls.none()
    if rows:
        columns = zip((column.name for column in fields(ModuleCalls)), zip(*rows, strict=True), strict=True)
        calls = ModuleCalls(**{name: np.array(column) for name, column in columns})
    return tuple(infos[number] for number in order), calls


def _refusal(of_ranks: Sequence[Sequence[_Call]]) -> str:
    """Why a module with these calls cannot be computed again; empty: it can."""
    calls = [call for rank_calls in of_ranks for call in rank_calls]
    if not all(of_ranks):
        return "no backward function of it was seen in the recorded steps"
    if any(call.communicates for call in calls):
        return "it communicates in its forward pass"
    most = max(np.unique([call.step for call in rank_calls], return_counts=True)[1].max() for rank_calls in of_ranks)
    return f"it runs {most} times in a step" if most > 1 else ""


def _calls(rank: RawRank, number: int, shift_us: float, steps: Steps) -> list[_Call]:
    """Calls in the profiled steps whose backward functions ran, in order of time."""
    spans = rank.spans
    place = {MODULE + module.name: i for i, module in enumerate(rank.hook.modules or [])}
    marks = np.flatnonzero(~spans.is_op & spans.named(MODULE, prefix=True))
    marks = marks[np.argsort(spans.start_us[marks], kind="stable")]
    functions = spans.is_op & spans.named(AUTOGRAD_FUNCTION, prefix=True) & (spans.sequence >= 0)
    numbered = np.flatnonzero(spans.is_op & (spans.sequence >= 0) & ~functions)
    forward = numbered[~inside(spans, numbered, spans.outermost(spans.is_op & spans.named(AUTOGRAD_FUNCTION, prefix=True)))]
    backward = np.flatnonzero(functions)
    backward = backward[np.argsort(spans.sequence[backward], kind="stable")]
    enqueues = np.flatnonzero(spans.is_op & spans.named(ENQUEUE, prefix=True))
    outer = np.flatnonzero(spans.outermost(spans.is_op))
    step_of_mark = step_of(steps, number, spans.start_us[marks] + shift_us)
    calls = []
    for mark, step in zip(marks.tolist(), step_of_mark.tolist(), strict=True):
        name, start_us, end_us = spans.names[spans.name[mark]], float(spans.start_us[mark]), float(spans.end_us[mark])
        same = forward[spans.thread[forward] == spans.thread[mark]]
        begin, end = np.searchsorted(spans.start_us[same], (start_us, end_us)).tolist()
        of_pass = same[begin:end]
        if name not in place or step < 0 or not len(of_pass):
            continue
        low = int(spans.sequence[of_pass].min())
        high = int(spans.sequence[same[end]]) if end < len(same) else int(spans.sequence[of_pass].max()) + 1
        ran = backward[slice(*np.searchsorted(spans.sequence[backward], (low, high)).tolist())]
        if not len(ran):
            continue
        backward_us, backward_end_us = float(spans.start_us[ran].min()), float(spans.end_us[ran].max())
        ops = outer[(spans.thread[outer] == spans.thread[mark]) & _begin_within(spans, outer, start_us, end_us)]
        calls.append(
            _Call(
                module=place[name],
                step=step,
                start_us=start_us,
                end_us=end_us,
                again_us=_needed_until_us(spans, of_pass, ran, start_us),
                backward_us=backward_us,
                backward_end_us=backward_end_us,
                low=low,
                high=high,
                communicates=bool(_begin_within(spans, enqueues, start_us, end_us).any()),
                rows=_rows(spans, of_pass, ran, ops, end_us - start_us, backward_end_us - backward_us),
            )
        )
    return calls


def _begin_within(spans: HostSpans, rows: Ints, start_us: float, end_us: float) -> npt.NDArray[np.bool_]:
    return (spans.start_us[rows] >= start_us) & (spans.start_us[rows] < end_us)


def _rows(spans: HostSpans, numbered: Ints, ran: Ints, ops: Ints, forward_us: float, backward_us: float) -> ModuleRows:
    """Rows of a call with numbered operators, outermost operators `ops` and backward functions `ran`."""
    numbers = spans.sequence[numbered]
    order = np.argsort(numbers, kind="stable")  # of equal numbers the last is the operator that a backward function belongs to
    last = order[np.searchsorted(numbers[order], spans.sequence[ran], side="right") - 1]
    op_of = np.searchsorted(spans.start_us[ops], spans.start_us[numbered[last]], side="right") - 1
    return ModuleRows(ops=ops, functions=ran, op_of=np.maximum(op_of, 0), forward_us=forward_us, backward_us=backward_us)


def _forward_nodes(execution: ExecutionTrace, spans: HostSpans) -> dict[int, ExecutionNode]:
    """The outermost operators before the first backward function of an execution trace, by their row in the profile."""
    row_of = {int(function): row for row, function in enumerate(spans.function.tolist()) if function > 0}
    node_of_row: dict[int, ExecutionNode] = {}
    for number in execution.operators:
        node = execution.nodes[number]
        if node.is_backward:
            break
        if node.function in row_of:
            node_of_row[row_of[node.function]] = node
    return node_of_row


def _needed_until_us(spans: HostSpans, numbered: Ints, ran: Ints, start_us: float) -> float:
    """When the last tensor is there that a backward function is to have; `ran` are these functions, by their numbers."""
    for function in ran[::-1].tolist():
        name = spans.names[spans.name[function]].removeprefix(AUTOGRAD_FUNCTION).partition("Backward")[0]
        made = numbered[spans.sequence[numbered] == spans.sequence[function]]
        if name in _SAVE_NOTHING or not len(made):
            continue
        innermost = made[np.argmax(spans.start_us[made])]
        return float(spans.start_us[innermost] if name in _SAVE_INPUTS else spans.end_us[innermost])
    return start_us


@dataclass
class _Buffer:
    """A storage that the forward pass made and the backward pass reads."""

    owner: int  # function of the outermost operator that made it
    made_us: float
    size_bytes: int
    read_us: float = -np.inf  # when the last operator of the forward pass read it
    readers: list[int] = field(default_factory=list)  # numbers of backward functions; -1: not known

    def is_only_of(self, call: _Call) -> bool:
        """Whether nothing outside a call, and its backward functions, reads it."""
        within = call.start_us <= self.made_us < call.end_us and self.read_us < call.end_us
        return within and all(call.low <= reader < call.high for reader in self.readers)


def _kept(execution: ExecutionTrace, spans: HostSpans) -> list[_Buffer]:
    """Buffers that are kept for the backward pass, in the order in which they were made."""
    row_of = {int(function): row for row, function in enumerate(spans.function.tolist()) if function > 0}
    held: dict[int, _Buffer] = {}  # by storage
    made: list[_Buffer] = []
    for node in execution.nodes:
        outer = execution.outermost.get(node.function, -1)
        row = row_of.get(outer, -1)
        if row < 0:
            continue
        backward = spans.names[spans.name[row]].startswith(AUTOGRAD_FUNCTION)
        for use in node.inputs:
            buffer = held.get(use.storage)
            if buffer is None or buffer.owner == outer:
                continue
            buffer.size_bytes = max(buffer.size_bytes, use.end)
            if backward:
                buffer.readers.append(int(spans.sequence[row]))
            else:
                buffer.read_us = max(buffer.read_us, float(spans.start_us[row]))
        read = {use.storage for use in node.inputs}
        for use in node.writes:
            if use.storage in read:
                continue
            known = held.get(use.storage)
            if known is not None and known.owner == outer:
                known.size_bytes = max(known.size_bytes, use.end)
                continue
            held.pop(use.storage, None)
            if not backward:
                held[use.storage] = _Buffer(owner=outer, made_us=float(spans.start_us[row]), size_bytes=use.end)
                made.append(held[use.storage])
    return [buffer for buffer in made if buffer.readers]
