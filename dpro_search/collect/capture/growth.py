"""How tensors grow with batch and sequence: steps captured at twice each, compared op by op."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dpro_search.collect.capture.graph_file import GROWTH, CapturedStep, CapturedTensor, SavedTensor

_LETTERS = {powers: letter for letter, powers in GROWTH.items()}
_POWERS = {1.0: 0, 2.0: 1, 4.0: 2}


def with_growth(plain: CapturedStep, doubled: Mapping[str, CapturedStep | None]) -> tuple[CapturedStep, tuple[str, ...], list[str]]:
    """The step with the growth of each tensor, the sizes that are known, and what is not.

    Parameters
    ----------
    doubled
        Steps at twice the "batch" and twice the "sequence".
    """
    known, notes, steps = [], [], {}
    for what, step in doubled.items():
        if step is None:
            continue
        if [op.name for op in step.ops] != [op.name for op in plain.ops] or len(step.saved) != len(plain.saved):
            notes.append(f"with twice the {what} the model runs other ops: its cost is known at the captured {what} only")
            continue
        known.append(what)
        steps[what] = step
    batch, sequence = steps.get("batch"), steps.get("sequence")
    ops = []
    for number, op in enumerate(plain.ops):
        twice = batch.ops[number] if batch else op
        longer = sequence.ops[number] if sequence else op
        ops.append(
            msgspec.structs.replace(
                op,
                inputs=_grown(op.inputs, twice.inputs, longer.inputs),
                outputs=_grown(op.outputs, twice.outputs, longer.outputs),
            )
        )
    saved = []
    for number, each in enumerate(plain.saved):
        powers = _power(each, batch, number), _power(each, sequence, number)
        saved.append(msgspec.structs.replace(each, grows=powers))
    return msgspec.structs.replace(plain, ops=tuple(ops), saved=tuple(saved)), tuple(known), notes


def _power(saved: SavedTensor, step: CapturedStep | None, number: int) -> int:
    return 0 if step is None else _POWERS.get(step.saved[number].size_bytes / max(saved.size_bytes, 1), 0)


def _grown(
    tensors: tuple[CapturedTensor, ...], twice: tuple[CapturedTensor, ...], longer: tuple[CapturedTensor, ...]
) -> tuple[CapturedTensor, ...]:
    if not len(tensors) == len(twice) == len(longer):
        return tensors
    return tuple(
        msgspec.structs.replace(tensor, grows="".join(map(_letter, tensor.shape, more.shape, long.shape)))
        if len(tensor.shape) == len(more.shape) == len(long.shape)
        else tensor
        for tensor, more, long in zip(tensors, twice, longer, strict=True)
    )


def _letter(size: int, twice: int, longer: int) -> str:
    if not size:
        return "."
    return _LETTERS.get((_POWERS.get(twice / size, 0), _POWERS.get(longer / size, 0)), ".")
