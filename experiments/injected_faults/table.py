"""`lines`: each case with what `expect` says of its numbers, and how often the injected cause comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dpro_search.analysis.expect import expect
from dpro_search.analysis.expect.answer import Expectation
from dpro_search.kinds import job_of, load_source
from experiments.injected_faults.cases import HEALTHY
from experiments.injected_faults.measure import Row

_AMONG = 3


def lines(rows: Sequence[Row], job_file: Callable[[str], Path]) -> Iterator[str]:
    """Markdown: a table of all cases, and the shares that were right."""
    yield "| job | injected | step time against the expected one | verdict | causes, the most probable first |"
    yield "|---|---|---:|---|---|"
    first, among, all_of = Counter[str](), Counter[str](), Counter[str]()
    for row in sorted(rows, key=lambda row: (row.cause, row.job, row.number)):
        answer = expect(job_of(load_source(job_file(row.job))), [f"{name}={value}" for name, value in row.measured.items()])
        names = [cause.name for cause in answer.causes[:_AMONG]]
        right_first, right_among = _right(row, answer, names[:1]), _right(row, answer, names)
        all_of[row.cause] += 1
        first[row.cause] += right_first
        among[row.cause] += right_among
        causes = ", ".join(f"{cause.name} {cause.probability:.0%}" for cause in answer.causes[:_AMONG])
        step = answer.values["step_us"]
        ratio = "" if step.measured is None else f"{step.measured / step.expected:.2f}"
        mark = "**" if right_first else "" if right_among else "*"
        yield f"| {row.job} | {mark}{row.cause}{mark} {row.words} | {ratio} | {answer.verdict} | {causes} |"
    faults = [cause for cause in all_of if cause != HEALTHY]
    count = sum(all_of[cause] for cause in faults)
    yield ""
    yield f"{count} cases of {len(faults)} causes: first {sum(first[cause] for cause in faults)}, among three"
    yield f"{sum(among[cause] for cause in faults)}; healthy: {first[HEALTHY]} of {all_of[HEALTHY]} as expected."


def _right(row: Row, answer: Expectation, names: Sequence[str]) -> bool:
    """Whether one of the named causes was injected; of a healthy job, whether it was said to be as expected."""
    if row.cause == HEALTHY:
        return answer.verdict == "as expected"
    return row.cause in names
