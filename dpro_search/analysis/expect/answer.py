"""`Expectation`: the answer of `expect`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dpro_search.analysis.expect.next_measurement import Measurement
from dpro_search.analysis.expect.quantities import ABOUT, Quantity


class ExpectedValue(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity: its value where nothing is wrong, the 90 % interval, and what was measured with its percentile (0 to 100)."""

    words: str
    expected: float
    interval: tuple[float, float]
    measured: float | None = None
    percentile: float | None = None


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A possible cause.

    Attributes
    ----------
    name, title
        Its name in ``causes.toml``; of two causes, both with "+" between them. "none": everything is as expected.
    probability
        That this is the cause, given all measured numbers, 0 to 1.
    severity
        The most probable one, in words.
    would_be
        Each quantity with the cause at that severity.
    would_also_see
        What else is seen if it is the cause, sentences.
    change
        The what-if that gave the numbers; empty: no replay is needed.
    links
        Sources.
    """

    name: str
    title: str
    probability: float
    severity: str
    would_be: Mapping[str, float]
    would_also_see: tuple[str, ...]
    links: tuple[str, ...]


class ComparableRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Published runs of a source that are like the job.

    Attributes
    ----------
    parameters, devices
        The least and the most of them.
    mfu_pct
        Quantiles of 10, 50 and 90 % of the runs.
    """

    source: str
    runs: int
    parameters: tuple[float, float]
    devices: tuple[int, int]
    mfu_pct: tuple[float, float, float]


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer.

    Attributes
    ----------
    quantity
        The number in which `expected`, `interval` and `measured` are: the one that was given, or else the step time in us.
    percentile
        Share of jobs like this one, with nothing wrong, whose value is at most the measured one, 0 to 100; None: nothing was given.
    verdict
        "as expected", "slower than expected", "faster than expected", "more memory than expected", ...; "not measured".
    mfu_pct
        Of the measured step, or of the expected one if none was measured; None: not known.
    values
        All quantities.
    causes
        The most probable first.
    not_told_apart
        Pairs of likely causes that none of the given numbers tells apart, a sentence each.
    next
        Measurements to make, the one that helps most first.
    """

    quantity: str
    expected: float
    interval: tuple[float, float]
    measured: float | None
    percentile: float | None
    verdict: str
    mfu_pct: float | None
    values: Mapping[str, ExpectedValue]
    causes: tuple[Cause, ...]
    not_told_apart: tuple[str, ...]
    comparable: tuple[ComparableRuns, ...]
    next: tuple[Measurement, ...]
    assumptions: tuple[str, ...]

    def lines(self) -> list[str]:
        """Each quantity in a line, and the verdict."""
        rows = [self._line(Quantity(name), value) for name, value in self.values.items()]
        return [*rows, f"This is {self.verdict}." if self.measured is not None else "Nothing was measured."]

    def _line(self, quantity: Quantity, value: ExpectedValue) -> str:
        text = ABOUT[quantity].text
        low, high = value.interval
        measured = ""
        if value.measured is not None and value.percentile is not None:
            measured = f"; measured {text(value.measured)}, above {value.percentile:.0f} % of such jobs"
        rate = (
            f" ({self._rate_text(quantity)})"
            if quantity is Quantity.STEP and self.quantity.endswith(("second", "device", "mfu"))
            else ""
        )
        return f"{value.words}: {text(value.expected)} ({text(low)} to {text(high)}){measured}{rate}"

    def _rate_text(self, quantity: Quantity) -> str:
        low, high = self.interval
        return f"{self.quantity} {self.expected:.5g} ({low:.5g} to {high:.5g}), measured {self.measured:.5g}"
