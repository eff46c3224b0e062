"""Results of the Python API, which a notebook shows as tables; `dpro_search.api` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

from msgspec import to_builtins
from msgspec.structs import asdict

from dpro_search._api import views
from dpro_search._api.views import Tabular, columns_of
from dpro_search._repr import short_call, short_repr
from dpro_search.analysis import predict
from dpro_search.graph.event_names import short_names
from dpro_search.report.html import bullets, paragraph, table, to_text
from dpro_search.report.units import duration, percent, ratio, signed_percent, size
from dpro_search.space.describe import describe

if TYPE_CHECKING:
    from dpro_search.deploy.validate import FailedPlan, MeasuredPlan, RefusedPlan

_MOST_GAINS = 5  # that a notebook shows
_LEAST_DRAWN = 0.005  # of an iteration: a bar of a smaller gain cannot be seen


class Microseconds(float):
    """A duration: a number of microseconds, which prints with the unit that suits it.

    >>> Microseconds(561421.3), Microseconds(80.0) * 2
    (561.4 ms, 160.0)
    >>> Microseconds(561421.3).seconds
    0.5614213
    """

    __slots__ = ()

    @classmethod
    def known(cls, value_us: float | None) -> Microseconds | None:
        """The duration, or None where it is not known."""
        return None if value_us is None else cls(value_us)

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self / 1e6

    def __repr__(self) -> str:
        return duration(self)

    __str__ = __repr__


class Bytes(int):
    """A size: a number of bytes, which prints with the unit that suits it.

    >>> Bytes(2**30)
    1.0 GiB
    """

    __slots__ = ()

    @classmethod
    def known(cls, value_bytes: int | None) -> Bytes | None:
        """The size, or None where it is not known."""
        return None if value_bytes is None else cls(value_bytes)

    def __repr__(self) -> str:
        return size(self)

    __str__ = __repr__


class Replay(predict.Replay, Tabular, frozen=True, kw_only=True, omit_defaults=True):
    """A predicted iteration: the fields of `dpro_search.analysis.predict.Replay`, the main ones with units."""

    @classmethod
    def of(cls, answer: predict.Replay) -> Self:
        """The answer with units on the numbers that people look at."""
        low_us, high_us = answer.interval_us
        with_units = {
            "iteration_us": Microseconds(answer.iteration_us),
            "interval_us": (Microseconds(low_us), Microseconds(high_us)),
            "measured_us": Microseconds.known(answer.measured_us),
            "breakdown_us": {part: Microseconds(part_us) for part, part_us in answer.breakdown_us.items()},
            "peak_memory_bytes": Bytes.known(answer.peak_memory_bytes),
        }
        return cls(**asdict(answer) | with_units)

    @property
    def facts(self) -> dict[str, Any]:  # Any: values of JSON
        """The output of ``dpro-search replay --json``."""
        return cast("dict[str, Any]", to_builtins(self, enc_hook=without_unit))

    def __repr__(self) -> str:
        main = ("iteration_us", "interval_us", "measured_us", "error_pct", "breakdown_us", "peak_memory_bytes")
        known = {name: value for name in main if (value := getattr(self, name)) is not None}
        return short_call("Replay", known)

    def columns(self) -> dict[str, Any]:
        """The breakdown: ``part`` and ``time_us``."""
        return {"part": list(self.breakdown_us), "time_us": list(self.breakdown_us.values())}

    def plot(self, ax: Any = None) -> Any:
        """Draw the breakdown with matplotlib, on `ax` or a new figure; returns the axes."""
        return views.breakdown(self.breakdown_us, f"An iteration of {duration(self.iteration_us)}", ax)

    def _repr_html_(self) -> str:
        low, high = map(duration, self.interval_us)
        rows = [("predicted iteration", duration(self.iteration_us)), ("interval", f"{low} to {high}")]
        if self.measured_us is not None and self.error_pct is not None:
            rows += [("measured iteration", duration(self.measured_us)), ("error", signed_percent(self.error_pct))]
        rows += [(name.replace("_", " "), duration(value_us)) for name, value_us in self.breakdown_us.items()]
        return to_text(table("Replay", ("", "time#"), rows))


def without_unit(value: object) -> float | int:
    """The plain number in a `Microseconds` or `Bytes`, which JSON can have."""
    return int(value) if isinstance(value, Bytes) else float(cast("float", value))


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Tabular):
    """The answer to the question why an iteration takes as long as it does."""

    # iteration_us, measured_us: Replayed and recorded; the latter None if not known.
    iteration_us: Microseconds
    measured_us: Microseconds | None
    findings: tuple[str, ...]  # Findings as sentences, the costliest first.
    # What-if questions with ``what_if``, ``predicted_iteration_us`` and ``gain_us``, the largest gain first.
    gains: tuple[Mapping[str, Any], ...]
    # The output of ``dpro-search diagnose --json``: also the critical path and the ranks.
    facts: Mapping[str, Any] = field(repr=False)

    __repr__ = short_repr

    def columns(self) -> dict[str, Any]:
        """The what-if questions: ``what_if``, ``predicted_iteration_us`` and ``gain_us``."""
        return columns_of(self.gains, ("what_if", "predicted_iteration_us", "gain_us"))

    def plot(self, ax: Any = None) -> Any:
        """Draw the gains of 0.5 % and more with matplotlib, on `ax` or a new figure; returns the axes."""
        gains = [gain for gain in self.gains if gain["gain_us"] >= _LEAST_DRAWN * self.iteration_us]
        return views.gains(gains, short_names([gain["what_if"] for gain in gains]), ax)

    def _repr_html_(self) -> str:
        rows = [
            (gain["what_if"], duration(gain["predicted_iteration_us"]), percent(gain["gain_us"] / self.iteration_us * 100))
            for gain in self.gains[:_MOST_GAINS]
        ]
        gained = table("What-if questions", ("what if", "iteration#", "gain#"), rows)
        return (
            f"<div>{to_text(paragraph(f'An iteration takes {duration(self.iteration_us)}.'), bullets(self.findings), gained)}</div>"
        )


@dataclass(frozen=True, kw_only=True)
class RealRuns(Tabular):
    """Real runs, compared with predictions."""

    # baseline_us, noise_pct: Typical iteration of the recorded setting, and half the range of its own runs: smaller differences are
    # noise.
    baseline_us: float
    noise_pct: float
    # Each with ``plan``, ``predicted_us``, ``measured_us``, ``error_pct``, ``speedup_measured``, ``speedup_interval`` (95 %),
    # ``beyond_noise`` and ``losses``.
    plans: tuple[MeasuredPlan, ...]
    refused: tuple[RefusedPlan, ...]  # Plans whose losses differ, with ``plan`` and ``losses``: no speed-up is reported.
    failed: tuple[FailedPlan, ...]  # Plans with a failed or endless run, with ``plan`` and ``reason``: no speed-up is reported.
    facts: Mapping[str, Any] = field(repr=False)  # The output of ``dpro-search validate --json``.

    __repr__ = short_repr

    def columns(self) -> dict[str, Any]:
        """The settings: ``plan`` in words, ``predicted_us``, ``measured_us``, ``speedup_measured`` and what failed (``reason``)."""
        recorded = {"plan": "as recorded", "predicted_us": self.facts["baseline_predicted_us"], "measured_us": self.baseline_us}
        rows = [recorded | {"speedup_measured": 1.0}]
        rows += [_row(ran) | {"speedup_measured": ran.speedup_measured} for ran in self.plans]
        rows += [_row(other) | {"reason": other.losses.reason} for other in self.refused]
        rows += [_row(lost) | {"reason": lost.reason} for lost in self.failed]
        return columns_of(rows, ("plan", "predicted_us", "measured_us", "speedup_measured", "reason"))

    def plot(self, ax: Any = None) -> Any:
        """Draw predicted and measured iterations with matplotlib, on `ax` or a new figure; returns the axes."""
        columns = self.columns()
        return views.real_runs(columns["plan"], columns["predicted_us"], columns["measured_us"], ax)

    def _repr_html_(self) -> str:
        rows = [("as recorded", duration(self.facts["baseline_predicted_us"]), duration(self.baseline_us), ratio(1.0), "")]
        for plan in self.plans:
            low, high = plan.speedup_interval
            gain = ratio(plan.speedup_measured) + ("" if plan.beyond_noise else " ?")
            rows.append(
                (describe(plan.plan), duration(plan.predicted_us), duration(plan.measured_us), gain, f"{low:.2f} to {high:.2f}")
            )
        for other in self.refused:
            reason = "none: trains something else"
            rows.append((describe(other.plan), duration(other.predicted_us), duration(other.measured_us), reason, ""))
        for lost in self.failed:
            measured = "" if lost.measured_us is None else duration(lost.measured_us)
            rows.append((describe(lost.plan), duration(lost.predicted_us), measured, f"none: {lost.reason}", ""))
        caption = f"Real runs; noise floor {percent(self.noise_pct)}; ? = within it"
        return to_text(table(caption, ("plan", "predicted#", "measured#", "speed-up#", "95 %#"), rows))


def _row(ran: MeasuredPlan | RefusedPlan | FailedPlan) -> dict[str, Any]:
    return {"plan": describe(ran.plan), "predicted_us": ran.predicted_us, "measured_us": ran.measured_us}
