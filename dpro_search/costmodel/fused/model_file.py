"""Trained cost models as a folder of data: ``model.json``, and the trees in ``trees.npz``. Nothing in it is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search._version import __version__
from dpro_search.collect._files import written_folder
from dpro_search.collect.tables.clusters import ClusterTable, MeasuredCluster, TableHeader
from dpro_search.collect.trace import Floats
from dpro_search.collect.trace_check import read_columns
from dpro_search.costmodel.forest import ARRAY_NAME, Forest
from dpro_search.costmodel.fused.additive import AdditiveModel, TreeSettings
from dpro_search.costmodel.fused.cost import (
    LEAST_DISTANCE,
    LEAST_SPREAD,
    MOST_POINTS,
    ClusterDomain,
    FusedCost,
    fit_fused_cost,
    widening,
)
from dpro_search.costmodel.fused.features import feature_names, shaped_features, timed_features
from dpro_search.costmodel.fused.flatten import flatten
from dpro_search.costmodel.fused.parts import CLASSES_OF, NAMES_OF, growing, term_count
from dpro_search.costmodel.fused.timed import timed_ops
from dpro_search.costmodel.intervals import are_scores, conformal_quantile
from dpro_search.costmodel.model_files import MOST_ERROR_PCT, read_info
from dpro_search.errors import InputError, TraceFormatError

MODEL_VERSION = 4  # 3: parts as a simulated compiler made them, trees as XGBoost's JSON
_TREES = "trees.npz"
_ARRAYS = re.compile(f"(shapes|times)_{ARRAY_NAME}")
_MOST = 1e9  # beyond any number of a fit


class EstimatorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An estimator, but for its trees."""

    scores: tuple[Score, ...]
    parameters: dict[str, float | str]
    features: tuple[str, ...]  # of whole clusters
    part_features: tuple[str, ...]
    part_classes: tuple[str, ...]
    trees_digest: str  # `Forest.digest` of its trees
    base: tuple[float, ...]
    residuals: tuple[float, ...]
    domain_centre: tuple[float, ...]
    domain_spread: tuple[float, ...]
    domain_points: tuple[tuple[float, ...], ...]
    domain_usual: float

    @property
    def overall(self) -> Score:
        """The score over all left-out models."""
        return next(score for score in self.scores if score.model == ALL)


class FusionModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `model.json`: provenance, scores, and what the trees need beside them."""

    version: int = MODEL_VERSION
    name: str = "xla-fusion"
    rows: int
    sources: tuple[TableHeader, ...]  # where the rows were measured
    trained_at: str
    versions: dict[str, str]
    shapes: EstimatorInfo  # of the estimator that sees shapes
    times: EstimatorInfo  # of the one that does not

    @property
    def scores(self) -> tuple[Score, ...]:
        """Per left-out model, of the estimator that sees shapes."""
        return self.shapes.scores

    @property
    def overall(self) -> Score:
        """The score over all left-out models, likewise."""
        return self.shapes.overall

    @property
    def refusal(self) -> str | None:
        """Why predictions from it are useless; None: they are not."""
        worst_pct = max(self.shapes.overall.mape_pct, self.times.overall.mape_pct)
        if worst_pct <= MOST_ERROR_PCT:
            return None
        return (
            f"it is wrong by {worst_pct:.0f} % on models that were left out (at most {MOST_ERROR_PCT:.0f} %): measure more "
            "clusters, of more models, on an idle machine"
        )


@dataclass(frozen=True, kw_only=True)
class FusionModel:
    """A trained model and what is known about it."""

    info: FusionModelInfo
    shaped: FusedCost  # For clusters with shapes, as `shaped_features` has them.
    timed: FusedCost  # For those of a trace, as `timed_features` has them.

    @staticmethod
    def train(tables: Sequence[ClusterTable]) -> FusionModel:
        """Train on measured clusters, each distinct one counted once.

        Raises
        ------
        InputError
            There are too few clusters, they are of one model only, or they were measured on different machines.
        """
        import xgboost  # only fits need it

        headers = tuple(table.header for table in tables)
        machines = sorted({header.machine for header in headers})
        if len(machines) > 1:
            raise InputError(f"the tables are of different machines ({'; '.join(machines)}): durations do not carry over")
        rows = distinct(tables)
        clusters = flatten([row.cluster for row in rows])
        fused, groups = np.array([row.fused_us for row in rows]), np.array([row.model for row in rows])
        shaped = fit_fused_cost(shaped_features(clusters), fused, groups, sees="shapes")
        timed = fit_fused_cost(timed_features(timed_ops(clusters)), fused, groups, sees="times")
        info = FusionModelInfo(
            rows=len(rows),
            sources=headers,
            trained_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"dpro-search": __version__, "xgboost": xgboost.__version__},
            shapes=_described(shaped, rows),
            times=_described(timed, rows),
        )
        return FusionModel(info=info, shaped=shaped, timed=timed)

    def save(self, folder: Path) -> None:
        """Write the folder; raises `InputError` if it exists already."""
        with written_folder(folder) as tmp:
            (tmp / "model.json").write_bytes(msgspec.json.encode(self.info) + b"\n")
            arrays: dict[str, npt.NDArray[Any]] = {}
            for cost in (self.shaped, self.timed):
                arrays |= cost.model.forest.arrays(cost.sees)
            np.savez_compressed(tmp / _TREES, **arrays)  # type: ignore[arg-type]

    @staticmethod
    def load(folder: Path) -> FusionModel:
        """Read a folder written by `save`; raises what `CommunicationModel.load` does."""
        info = read_info(folder / "model.json", FusionModelInfo, MODEL_VERSION, "cost model")
        if not all(any(score.model == ALL for score in one.scores) for one in (info.shapes, info.times)):
            raise TraceFormatError(f"{folder / 'model.json'}: no score of all models; train it again with 'dpro-search fit'")
        if info.refusal is not None:
            raise InputError(f"{folder / 'model.json'}: {info.refusal}; train it again")
        return FusionModel(info=info, shaped=_loaded(folder, "shapes", info.shapes), timed=_loaded(folder, "times", info.times))


def distinct(tables: Sequence[ClusterTable]) -> tuple[MeasuredCluster, ...]:
    """The measured clusters of some tables, equal ones once."""
    rows: dict[str, MeasuredCluster] = {}
    for table in tables:
        for row in table.measured:
            rows.setdefault(row.cluster.fingerprint, row)
    return tuple(rows.values())


def _described(cost: FusedCost, rows: Sequence[MeasuredCluster]) -> EstimatorInfo:
    domain = cost.domain
    return EstimatorInfo(
        scores=left_out_scores(rows, cost),
        parameters={"sees": cost.sees, **asdict(TreeSettings())},
        features=feature_names(cost.sees),
        part_features=NAMES_OF[cost.sees],
        part_classes=CLASSES_OF[cost.sees],
        trees_digest=cost.model.forest.digest,
        base=tuple(cost.model.base.tolist()),
        residuals=tuple(cost.scores.tolist()),
        domain_centre=tuple(domain.centre.tolist()),
        domain_spread=tuple(domain.spread.tolist()),
        domain_points=tuple(map(tuple, domain.points.tolist())),
        domain_usual=domain.usual,
    )


def _loaded(folder: Path, sees: str, info: EstimatorInfo) -> FusedCost:
    path = folder / "model.json"
    known = (*feature_names(sees), *NAMES_OF[sees], *CLASSES_OF[sees])
    trained_on = (*info.features, *info.part_features, *info.part_classes)
    if trained_on != known:
        missing = sorted(set(trained_on) ^ set(known))
        what = f"other features ({', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''})" if missing else "another order"
        raise InputError(f"{path}: the model was trained on {what} than this program has; train it again with 'dpro-search fit'")
    for wrong, what in _problems(info, term_count(sees)):
        if wrong:
            raise TraceFormatError(f"{path}: {what}; train it again with 'dpro-search fit'")
    forest = _read_forest(folder / _TREES, sees)
    if forest.digest != info.trees_digest:
        raise TraceFormatError(f"{folder / _TREES}: damaged or of another model; train it again with 'dpro-search fit'")
    domain = ClusterDomain(
        centre=np.array(info.domain_centre),
        spread=np.array(info.domain_spread),
        points=np.array(info.domain_points),
        usual=info.domain_usual,
    )
    model = AdditiveModel(base=np.array(info.base), forest=forest)
    return FusedCost(sees=sees, model=model, domain=domain, scores=np.array(info.residuals))


def _read_forest(path: Path, sees: str) -> Forest:
    try:
        return Forest.from_arrays(read_columns(path, _ARRAYS), sees, len(growing(sees)))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a folder made by 'dpro-search fit'") from error
    except (ValueError, KeyError) as error:
        raise TraceFormatError(f"{path}: damaged or no trees ({error}); train it again with 'dpro-search fit'") from error


def _problems(info: EstimatorInfo, terms: int) -> Iterator[tuple[bool, str]]:
    """Check for values that no fit gives, each with its message."""
    count = len(info.features)
    sizes = {len(row) for row in (info.domain_centre, info.domain_spread, *info.domain_points)}
    yield len(info.base) != terms or sizes != {count}, "its parts do not fit the features"
    yield not 0 < len(info.domain_points) <= MOST_POINTS, f"{len(info.domain_points)} points of what was measured"
    yield not info.residuals or not are_scores(info.residuals), "residuals that are not sorted, impossible, or none"
    yield not all(0 <= us <= _MOST for us in info.base), "an impossible cost of a term"
    points = np.array((info.domain_centre, *info.domain_points))
    yield bool((np.abs(points) > _MOST).any()), "an impossible point"
    yield not all(LEAST_SPREAD <= spread <= _MOST for spread in info.domain_spread), "an impossible spread"
    yield not LEAST_DISTANCE <= info.domain_usual <= _MOST, "an impossible distance"


COVERAGE = 0.9
SCALED_SUM = 0.8
ALL = "all"


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Scores on the clusters of one model, predicted by a fit on all others (`ALL`: on all clusters so predicted)."""

    model: str
    rows: int
    mape_pct: float
    median_error_pct: float
    coverage: float | None  # share inside the 90 % interval; None: no other models to take its width from
    refused: int  # rows too far from what was measured
    pays_rows: int  # rows whose fused and unfused times are of the same ops, and differ by more than the noise
    pays_right_pct: float | None  # of those, where prediction and measurement agree on whether fusing pays; None: there are none
    sum_mape_pct: float
    sum_pays_right_pct: float | None
    scaled_sum_mape_pct: float
    scaled_sum_pays_right_pct: float | None
    never_pays_right_pct: float | None  # of the answer that fusing never pays


def left_out_scores(rows: Sequence[MeasuredCluster], cost: FusedCost) -> tuple[Score, ...]:
    """A score for each left-out model, by name, and one for all.

    Parameters
    ----------
    rows
        The n clusters that the cost was fitted on, in the same order, grouped by their models.

    Raises
    ------
    InputError
        The rows are of one model only.
    """
    groups = np.array([row.model for row in rows])
    names = sorted(set(groups.tolist()))
    if cost.left_out is None:
        raise InputError("the measured clusters are of one model: scores on left-out models need at least two")
    fused = np.array([row.fused_us for row in rows])
    errors, distance = cost.left_out
    relative = np.abs(errors) / widening(distance)
    inside = np.full(len(rows), np.nan)
    if len(names) > 2:
        for name in names:
            # The width comes from the other models' errors: this one's are not known beforehand.
            of_model = groups == name
            inside[of_model] = relative[of_model] <= conformal_quantile(np.sort(relative[~of_model]), COVERAGE)
    refused = ClusterDomain.refuses(distance)
    predicted = fused * np.exp(errors)
    members = np.array([sum(row.cluster.op_us) for row in rows])

    def score(name: str, chosen: npt.NDArray[np.bool_]) -> Score:
        picked = [rows[int(i)] for i in np.flatnonzero(chosen)]
        error = np.abs(predicted[chosen] / fused[chosen] - 1) * 100
        answered = inside[chosen & ~refused]
        never = np.full(len(rows), np.inf)
        right = [_pays_right_pct(picked, guess[chosen]) for guess in (predicted, members, SCALED_SUM * members, never)]
        return Score(
            model=name,
            rows=len(picked),
            mape_pct=float(error.mean()),
            median_error_pct=float(np.median(error)),
            coverage=None if len(names) < 3 or not len(answered) else float(answered.mean()),
            refused=int(refused[chosen].sum()),
            pays_rows=sum(row.pays is not None for row in picked),
            pays_right_pct=right[0],
            sum_mape_pct=float(np.abs(members[chosen] / fused[chosen] - 1).mean()) * 100,
            sum_pays_right_pct=right[1],
            scaled_sum_mape_pct=float(np.abs(SCALED_SUM * members[chosen] / fused[chosen] - 1).mean()) * 100,
            scaled_sum_pays_right_pct=right[2],
            never_pays_right_pct=right[3],
        )

    return (*(score(name, groups == name) for name in names), score(ALL, np.ones(len(rows), bool)))


def _pays_right_pct(rows: Sequence[MeasuredCluster], predicted_us: Floats) -> float | None:
    answers = [
        (guess < row.unfused_us) == row.pays for row, guess in zip(rows, predicted_us.tolist(), strict=True) if row.pays is not None
    ]
    return float(np.mean(answers)) * 100 if answers else None
