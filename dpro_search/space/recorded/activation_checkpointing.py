"""``compute_again(edit, passes)``: activation checkpointing, a unit's recorded forward pass once more before its backward pass.

The thread of the backward pass launches again what the forward pass launched, in the same times; the device does it again before
anything else of the backward pass. What the forward pass communicated it does not repeat.
"""

from __future__ import annotations

from collections.abc import Mapping

from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.sharded_units import UnitPasses
from dpro_search.space.recorded.step_edit import StepEdit

_AGAIN = "again: "  # before the name of what is computed again


def compute_again(edit: StepEdit, passes: UnitPasses, rank: int, devices: Mapping[tuple[int, str], int]) -> None:
    """Insert a unit's forward pass before its backward pass; `devices` are those of the edit by rank and name."""
    forward = devices[rank, f"host thread {-passes.forward.thread}"]
    backward = devices[rank, f"host thread {-passes.backward_thread}"]
    last = edit.cut(backward, passes.backward_us)
    stretches = edit.within(forward, passes.forward.start_us, passes.forward.end_us)
    copy_of: dict[int, int] = {}
    for op in stretches:
        last = edit.insert(backward, edit.duration_us[op], _backward(edit.kind[op]), _AGAIN + edit.name[op], after=last)
        copy_of[op] = last
    launched = [edit.event_op[event] for event in passes.forward.events if event in edit.event_op]
    for op in launched:
        launch = edit.launch_of(op)
        if edit.kind[op] == OpKind.COMM or launch < 0 or edit.is_out(op):
            continue
        place = edit.first_decided(edit.device[op], passes.backward_us)
        again = edit.insert(edit.device[op], edit.duration_us[op], _backward(edit.kind[op]), _AGAIN + edit.name[op], before=place)
        call = edit.insert(edit.device[launch], edit.duration_us[launch], OpKind.HOST, _AGAIN + edit.name[launch])
        edit.need(call, again)
        for host in (need for need in edit.needs[launch] if need in copy_of):
            edit.need(copy_of[host], call)


def _backward(kind: int) -> OpKind:
    """The kind of an op of the forward pass when it runs in the backward pass."""
    return OpKind.BACKWARD if kind == OpKind.FORWARD else OpKind(kind)
