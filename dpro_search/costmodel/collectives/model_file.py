"""A trained model of communication: the cost of all-reduces by each backend and algorithm, its scores, and its folder on disk.

The folder holds ``communication.json`` only: constants of formulas, and the points and constants of what corrects them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search._version import __version__
from dpro_search.collect._files import written_folder
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.all_reduce_formula import AllReduceCost
from dpro_search.costmodel.collectives.cost import CollectiveCost, FormulaErrors, fit_collective_cost
from dpro_search.costmodel.collectives.counts import POINT_COLUMNS, Points
from dpro_search.costmodel.collectives.series import Series
from dpro_search.costmodel.intervals import Durations, are_scores, conformal_quantile
from dpro_search.costmodel.model_files import MOST_ERROR_PCT, read_info
from dpro_search.errors import InputError, TraceFormatError

MODEL_VERSION = 3  # 1: corrected by trees; 2: the correction did not see servers
COVERAGE = 0.9
_FILE = "communication.json"
_MOST_SERIES, _MOST_RANKS, _MOST = 256, 1 << 20, 2.0**60  # beyond any backends with algorithms, ranks, constants and sizes
_HALVES = 2  # of the left-out points, which calibrate each other's intervals


class SeriesInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One backend and algorithm: constants, scores on sizes left out of the fit, and what was measured."""

    name: str
    rows: int
    sizes: int
    cost: AllReduceCost
    # mape_pct, formula_mape_pct: Mean error on left-out sizes, of all and of the formula alone; None: there were too few.
    mape_pct: float | None
    formula_mape_pct: float | None
    coverage: float | None  # Share of left-out points inside the 90 % interval, whose width comes from the others.
    spread_pct: float | None  # Median distance of repeated measurements, to compare with; None: not known.
    # low, high: Least and largest measured value of every column of `POINT_COLUMNS`; infinite ones are None.
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    residuals: tuple[float, ...]  # Sorted errors of the logarithm, which give the intervals.
    # The same for each octave of ranks or rate beyond what was measured, by the name of the column.
    carried: dict[str, tuple[float, ...]] = {}
    residual: FormulaErrors | None = None  # Learned error of the formula; None: there were too few points to learn it.

    @property
    def refusal(self) -> str | None:
        """The reason why predictions are useless; None: they are not, or their error is not known."""
        if self.mape_pct is None or self.mape_pct <= MOST_ERROR_PCT:
            return None
        return (
            f"'{self.name}' is wrong by {self.mape_pct:.0f} % on sizes that were left out (at most {MOST_ERROR_PCT:.0f} %): "
            "measure more sizes and rounds, on an idle machine"
        )


class CommunicationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the file."""

    version: int = MODEL_VERSION
    series: tuple[SeriesInfo, ...]
    sources: tuple[str, ...]  # origins of the points, as text
    columns: tuple[str, ...] = POINT_COLUMNS
    trained_at: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CommunicationModel:
    """Fitted costs by the name of their series, and their provenance and scores."""

    info: CommunicationInfo
    costs: dict[str, CollectiveCost]

    @staticmethod
    def train(series: Sequence[Series], sources: Sequence[str]) -> CommunicationModel:
        """Train on measured all-reduces; series of one name are taken together.

        Raises
        ------
        InputError
            There is no series, or one with too few points.
        """
        import sklearn  # only fits need it

        if not series:
            raise InputError("nothing to train on: no measured all-reduce was given")
        infos, costs = [], {}
        for one in Series.joined(series):
            try:
                costs[one.name] = fit_collective_cost(
                    one.points,
                    one.duration_us,
                    algorithms=one.algorithms,
                    busy_us=one.busy_us,
                    meets=one.meets,
                    ranks_per_host=one.ranks_per_host,
                )
            except InputError as error:
                raise InputError(f"{one.name}: {error}") from error
            infos.append(_info(one, costs[one.name]))
        info = CommunicationInfo(
            series=tuple(infos),
            sources=tuple(sources),
            trained_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"dpro-search": __version__, "scikit-learn": sklearn.__version__},
        )
        return CommunicationModel(info=info, costs=costs)

    def useful(self) -> CommunicationModel:
        """The model without the series whose error is too large."""
        kept = tuple(one for one in self.info.series if one.refusal is None)
        info = msgspec.structs.replace(self.info, series=kept)
        return CommunicationModel(info=info, costs={one.name: self.costs[one.name] for one in kept})

    def predict(self, name: str, points: Points) -> Durations:
        """Durations of all-reduces of a series, with 90 % intervals where left-out sizes show how wide they are.

        Raises
        ------
        InputError
            The model has no such series.
        """
        if name not in self.costs:
            raise InputError(f"the model has no series '{name}'; it has {', '.join(self.costs)}")
        return self.costs[name].predict_interval(points, COVERAGE)

    def fastest(self, names: Sequence[str], points: Points) -> tuple[list[str], Floats]:
        """The series of several that is predicted fastest at each point, and its time: (names [points], us [points]).

        Raises as `predict`.
        """
        unknown = [name for name in names if name not in self.costs]
        if unknown or not names:
            raise InputError(f"the model has no series '{unknown[0] if unknown else ''}'; it has {', '.join(self.costs)}")
        times = np.stack([self.costs[name].predict(points) for name in names])
        return [names[number] for number in times.argmin(axis=0).tolist()], times.min(axis=0)

    def save(self, folder: Path) -> None:
        """Write the folder; raises `InputError` if it exists already."""
        with written_folder(folder) as tmp:
            (tmp / _FILE).write_bytes(msgspec.json.encode(self.info) + b"\n")

    @staticmethod
    def load(folder: Path) -> CommunicationModel:
        """Read a folder written by `save`.

        Raises
        ------
        InputError
            A file is missing, the model was trained on other features than this program computes, or its error is too large.
        TraceVersionError
            Written by another version.
        TraceFormatError
            A file is damaged.
        """
        path = folder / _FILE
        info = read_info(path, CommunicationInfo, MODEL_VERSION, "model of communication")
        if info.columns != POINT_COLUMNS:
            raise InputError(f"{path}: the model was trained on other features than this program has; train it again")
        for wrong, what in _problems(info):
            if wrong:
                raise TraceFormatError(f"{path}: {what}; train it again with 'dpro-search fit'")
        return CommunicationModel(info=info, costs={one.name: _loaded_cost(path, one) for one in info.series})


def _loaded_cost(path: Path, info: SeriesInfo) -> CollectiveCost:
    if info.refusal is not None:
        raise InputError(f"{path}: {info.refusal}; train it again")
    low, high = ([np.inf if value is None else value for value in values] for values in (info.low, info.high))
    return CollectiveCost(
        formula=info.cost,
        residual=info.residual,
        low=np.array(low),
        high=np.array(high),
        scores=np.array(info.residuals),
        carried={name: np.array(scores) for name, scores in info.carried.items() if scores},
    )


def _info(series: Series, cost: CollectiveCost) -> SeriesInfo:
    known = series.spread_pct[np.isfinite(series.spread_pct)]
    return SeriesInfo(
        name=series.name,
        rows=len(series.duration_us),
        sizes=len(np.unique(series.points.size_bytes)),
        cost=cost.formula,
        mape_pct=_mape_pct(cost.left_out),
        formula_mape_pct=_mape_pct(cost.formula_left_out),
        coverage=_coverage(cost.left_out, series.points),
        spread_pct=float(np.median(known)) if len(known) else None,
        low=_or_none(cost.low),
        high=_or_none(cost.high),
        residuals=tuple(np.round(cost.scores, 6).tolist()),
        carried={name: tuple(np.round(scores, 6).tolist()) for name, scores in cost.carried.items()},
        residual=cost.residual,
    )


def _problems(info: CommunicationInfo) -> Iterator[tuple[bool, str]]:
    """Check for values that no fit gives, each with its message."""
    yield len(info.series) > _MOST_SERIES, f"{len(info.series)} series"
    yield len({one.name for one in info.series}) < len(info.series), "two series of one name"
    for one in info.series:
        constants = {name: value for name, value in msgspec.structs.asdict(one.cost).items() if name != "algorithm"}
        for name, value in constants.items():
            yield not 0 <= value <= _MOST, f"series '{one.name}': impossible {name}"
        yield one.cost.exposed > 1, f"series '{one.name}': impossible exposed"
        yield not 1 <= one.cost.ranks_per_host <= _MOST_RANKS, f"series '{one.name}': impossible ranks_per_host"
        known = [value for value in (*one.low, *one.high) if value is not None]
        yield not all(0 <= value <= _MOST for value in known), f"series '{one.name}': an impossible range"
        scores_usable = all(map(are_scores, (one.residuals, *one.carried.values())))
        yield not scores_usable, f"series '{one.name}': residuals that are not sorted, or impossible"
        for values in (one.low, one.high):
            yield len(values) != len(POINT_COLUMNS), f"the range of a series has {len(values)} columns"
        problem = "" if one.residual is None else one.residual.problem
        yield bool(problem), problem


def _mape_pct(errors: Floats | None) -> float | None:
    """Mean of |predicted / measured - 1|, from errors of the logarithm."""
    if errors is None or not np.isfinite(errors).any():
        return None
    return float(np.abs(np.exp(errors[np.isfinite(errors)]) - 1).mean()) * 100


def _coverage(errors: Floats | None, points: Points) -> float | None:
    """Share of left-out points inside intervals whose width the other half of the sizes gives."""
    if errors is None:
        return None
    sizes, row = np.unique(points.size_bytes, return_inverse=True)
    half = row % _HALVES if len(sizes) >= _HALVES else np.arange(len(errors)) % _HALVES
    usable = np.isfinite(errors)
    inside: list[npt.NDArray[np.bool_]] = []
    for number in range(_HALVES):
        judged, others = usable & (half == number), usable & (half != number)
        if not judged.any() or not others.any():
            return None
        inside.append(np.abs(errors[judged]) <= conformal_quantile(np.sort(np.abs(errors[others])), COVERAGE))
    return float(np.concatenate(inside).mean())


def _or_none(values: Floats) -> tuple[float | None, ...]:
    return tuple(value if np.isfinite(value) else None for value in values.tolist())
