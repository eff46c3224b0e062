"""Origins of events, as far as the trace has them: the framework's op, the module and the line of the user's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpro_search.collect.trace import Ints, Trace

KEYS = ("framework_op", "module", "source")


def origins(trace: Trace, events: Ints) -> list[dict[str, str]]:
    """The known origins of each event: some of `KEYS`."""
    table = trace.events
    columns = [column[events].tolist() for column in (table.op, table.module, table.source)]
    return [
        {key: trace.names[number] for key, number in zip(KEYS, numbers, strict=True) if number >= 0}
        for numbers in zip(*columns, strict=True)
    ]


def origin_text(row: Mapping[str, Any]) -> str:
    """An origin in one line: "aten::addmm in Net_0.Linear_0, train.py(6): forward"; empty where nothing is known."""
    op, module, source = (row.get(key, "") for key in KEYS)
    others = row.get("origins", 0) - 1
    text = ", ".join(filter(None, (" in ".join(filter(None, (op, module))), source)))
    return f"{text}, and {others} other {'place' if others == 1 else 'places'}" if text and others > 0 else text
