"""`completed`: the rows that a row may stand for, with a value in each blank that decides its time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dpro_search.errors import InputError
from dpro_search.parallel.model import parameters_of
from experiments.truth.megatron_tests import is_test
from experiments.truth.models import described, is_described, is_network, vocabularies_of
from experiments.truth.rows import Row

# Dims of a head that published transformers have: 64 (GPT-2) to 160 (GPT-3 6.7B is 128, GPT-J 256 is alone).
NARROWEST_HEAD, WIDEST_HEAD = 64, 160
MOST_HEADS = 4  # Numbers of heads that are tried where a row gives none, evenly chosen.
FIRST_ROUND_IN_4_BITS = 5.1  # The round of MLPerf training with NVIDIA's first submissions in NVFP4 (November 2025).
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([bm])(?![a-z0-9])")


def completed(row: Row) -> tuple[Row, ...]:
    """All rows that a row may stand for; itself alone where its blanks decide nothing.

    A prediction of the row is the geometric mean of theirs.
    """
    whole = _with_dims(row)
    choices = {
        name: values
        for name, values in (
            ("precision", _precisions(whole)),
            ("heads", _heads(whole)),
            ("overlap", _compiled(whole)),
            ("recompute", _recomputed(whole)),
        )
        if values
    }
    return tuple(_filled(whole, dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values()))


def _filled(row: Row, values: Mapping[str, str]) -> Row:
    return replace(row, values={**row.values, **values}) if values else row


def _precisions(row: Row) -> Sequence[str]:
    """The lowest precisions that a device has and its benchmark's submissions use, for a row that gives none.

    Submissions to MLPerf train language models in 8 bits from Hopper on and in 4 or 8 bits on Blackwell; networks for vision and
    BERT in 16 bits. Megatron-Bridge's tables without a precision are those in fp8: Llama 3 8B takes as long as in rows that say so.
    """
    if row.text("precision"):
        return ()
    source, gpu = row.text("source"), row.text("gpu")
    if "bridge" in source:
        return ("fp8",)
    language = not is_network(row) and "bert" not in row.text("model")
    if source.startswith("mlperf") and language and re.search(r"[hb][1-3]00|h200|mi3", gpu):
        round_ = float(match[1]) if (match := re.search(r"v(\d+\.\d+)", source)) else 0.0
        return ("fp8", "fp4") if re.search(r"b[23]00|mi35", gpu) and round_ >= FIRST_ROUND_IN_4_BITS else ("fp8",)
    return ("fp16",) if re.search(r"v100|p100|t4", gpu) else ("bf16",)


def _heads(row: Row) -> Sequence[str]:
    """Numbers of heads that divide the hidden size into heads of a usual width, and that the tensor parallel ranks can share."""
    hidden, tp = row.whole("hidden", 0), row.whole("tp", 1)
    if row.text("heads") or not is_described(row):
        return ()
    able = [
        heads
        for heads in range(tp, hidden // NARROWEST_HEAD + 1, tp)
        if hidden % heads == 0 and NARROWEST_HEAD <= hidden // heads <= WIDEST_HEAD
    ]
    if not able:
        raise InputError(f"no number of heads of {NARROWEST_HEAD} to {WIDEST_HEAD} dims divides hidden size {hidden}")
    step = -(-len(able) // MOST_HEADS)
    return tuple(str(heads) for heads in able[::step])


def _compiled(row: Row) -> Sequence[str]:
    """Whether a job of a framework that has both forms is compiled, where nothing says it."""
    if re.search(r"torchtitan|fsdp \(fms", row.text("framework")) and not row.text("overlap"):
        return ("eager",) if "torchtitan" in row.text("framework") else ("eager", "torch.compile")
    return ()


def _recomputed(row: Row) -> Sequence[str]:
    """None and all, for policies that compute an unknown share again: FMS's selective one, MaxText's by op, and any of Paxml's."""
    text, framework = row.text("recompute"), row.text("framework")
    some = ("fsdp (fms" in framework and text == "selective") or ("paxml" in framework and not text)
    return ("none", "full") if some or re.match(r"remat_policy=(save|minimal_)", text) else ()


def _with_dims(row: Row) -> Row:
    """The row with the layers, the vocabulary and the kind of feed-forward that the size in its model's name leaves.

    A name like "GPT 182B" rounds the number of parameters; of several values the first one that gives it counts, or the nearest.
    """
    size = _size(row)
    if size is None or not row.number("hidden") or (row.number("vocab") and row.number("layers")):
        return row
    parameters, rounding = size
    best, least = row, float("inf")
    for candidate in _candidates(row, parameters):
        apart = abs(parameters_of(described(candidate)) - parameters)
        if apart <= rounding:
            return candidate
        if apart < least:
            best, least = candidate, apart
    return best


def _candidates(row: Row, parameters: float) -> Iterator[Row]:
    for vocabulary in vocabularies_of(row):
        whole = _filled(row, {"vocab": str(vocabulary)})
        if row.number("layers"):
            yield whole
        else:
            yield _filled(whole, {"layers": str(_layers(whole, parameters))})


def _layers(row: Row, parameters: float) -> int:
    """The number of layers with which a model has about so many parameters; a multiple of the pipeline stages."""
    stages = row.whole("pp", 1) * row.whole("vpp", 1)
    one, two = (parameters_of(described(_filled(row, {"layers": str(layers)}))) for layers in (1, 2))
    return max(round((1 + (parameters - one) / (two - one)) / stages), 1) * stages


def _size(row: Row) -> tuple[float, float] | None:
    """Parameters that a model's name gives, and by how much they may be rounded; None where it gives none."""
    match = SIZE.search(row.text("model"))
    if match is None or row.number("experts") or is_test(row) or "~" in row.text("model"):
        return None
    unit = 1e9 if match[2] == "b" else 1e6
    digits = len(match[1].partition(".")[2])
    return float(match[1]) * unit, 0.5 * 10**-digits * unit
