"""An Optuna storage that several searches share: databases (``postgresql://...``) and ``journal://`` files.

A row of the study holds a plan, its prediction and its origin, as JSON in the row's user attribute "trial". It is inserted in one
transaction when the plan has been evaluated, so a finished trial is stored completely or not at all. The storage numbers the rows
of a study. Of rows with equal plans only the lowest number counts, so all searches see the same trials in the same order, even if
some are killed. For other readers of the study (dashboards) a row has the plan's parameters (`PlanParams`), and a second
transaction writes its state: COMPLETE, or FAIL for a row that does not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.search.run_folder import Trial
from dpro_search.search.samplers import Proposal
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.plan_json import by_setting, converted
from dpro_search.space.transformations import PlanSpace

PATIENCE_S = 60.0  # how long a storage may be unreachable
_OPENING_PATIENCE_S = 10.0  # at the start, when an address or a password may be wrong
_PAUSES_S = (0.05, 2.0)  # the first and the longest between two attempts
_SECRETS = ("password", "sslpassword", "passwd")
_JOURNAL = "journal"
_ATTRIBUTE = "trial"  # a single one, because the storage needs several queries for each
_NONE = "none"
_MOST_NAMED = 4096  # groups, ops or modules that a parameter counts
_LOG_FROM = 16.0  # ratio of the largest to the smallest value, from which a parameter is logarithmic

_T = TypeVar("_T")


class SharedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A trial as the user attribute of a row stores it."""

    plan: Plan
    prediction: Prediction
    origin: str
    run: str  # `RunInfo.id` of the search that evaluated it


class StudyTrial(NamedTuple):
    """A trial of the study, and whether this search evaluated it."""

    trial: Trial
    own: bool


class SharedStudy:
    """The trials of all searches that share a study.

    Parameters
    ----------
    url
        An address that SQLAlchemy knows, or ``journal:///folder/file`` for a file on a common disk.
    name
        Of the study; it is created if it does not exist.
    run
        Of this search, different from all others'.
    space
        The plans of the job, for the rows' parameters; None: rows have none.

    Attributes
    ----------
    trials
        Those read so far, in order.

    Raises
    ------
    InputError
        The address is invalid, or the study has rows that no search wrote.
    MissingCapabilityError
        The storage needs a package that is not installed, or cannot be reached. Every method retries for `PATIENCE_S`
        and raises it then.
    """

    def __init__(self, url: str, name: str, run: str, space: PlanSpace | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # errors are reported once, by this class
        self.place = without_password(url)
        self._run = run
        self._params = None if space is None else PlanParams(space)
        self._read = 0  # rows that were read
        self.trials: list[Trial] = []
        self._plans: set[Plan] = set()
        self._own_running: dict[int, float | None] = {}  # rows without a state, by number: value of those that count
        self._others_running: dict[int, float | None] = {}

        def opened() -> tuple[optuna.storages.BaseStorage, optuna.Study]:
            storage = _storage(url)
            return storage, optuna.create_study(study_name=name, storage=storage, load_if_exists=True)

        self._storage, self._study = self._patiently(opened, _OPENING_PATIENCE_S)
        self._study_id = self._patiently(lambda: self._storage.get_study_id_from_name(name))

    def __len__(self) -> int:
        """Trials read so far."""
        return len(self.trials)

    def __contains__(self, plan: Plan) -> bool:
        """Whether a trial read so far has this plan."""
        return plan in self._plans

    def news(self) -> list[StudyTrial]:
        """Trials that were not returned before, in order."""
        rows = self._patiently(lambda: self._study.get_trials(deepcopy=False))
        news = []
        for row in rows[self._read :]:
            shared = self._decoded(row)
            counts, is_this_run = shared.plan not in self._plans, shared.run == self._run
            if not row.state.is_finished():
                running = self._own_running if is_this_run else self._others_running
                running[row.number] = shared.prediction.iteration_us if counts else None
            if counts:
                trial = Trial(number=len(self.trials), origin=shared.origin, plan=shared.plan, prediction=shared.prediction)
                self.trials.append(trial)
                self._plans.add(shared.plan)
                news.append(StudyTrial(trial, is_this_run))
        self._read = len(rows)
        return news

    def add(self, proposal: Proposal, prediction: Prediction) -> list[StudyTrial]:
        """Store an evaluated plan; returns the new trials, with this one among them if no other search stored its plan first."""
        shared = SharedTrial(plan=proposal.plan, prediction=prediction, origin=proposal.origin, run=self._run)
        row = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=self._params.of(proposal.plan) if self._params else {},
            distributions=dict(self._params.distributions) if self._params else {},
            # Settings side by side, as version 1 wrote and reads them: searches of both versions may share a study.
            user_attrs={_ATTRIBUTE: by_setting(shared)},
        )
        self._patiently(lambda: self._study.add_trial(row))
        news = self.news()
        self._settle(self._own_running)
        return news

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        """Write the states that searches which were killed left open as well."""
        if error is None:
            self._settle(self._others_running)

    def _settle(self, running: dict[int, float | None]) -> None:
        for number, value in list(running.items()):
            self._patiently(lambda number=number, value=value: self._write_state(number, value))  # type: ignore[misc]
            del running[number]

    def _write_state(self, number: int, value: float | None) -> None:
        """Through the storage, because `Study.tell` asks it for the whole trial twice."""
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        with suppress(optuna.exceptions.UpdateFinishedTrialError):  # another search wrote the same
            if value is None:
                self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
            else:
                self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [value])

    def _decoded(self, row: FrozenTrial) -> SharedTrial:
        try:
            return converted(row.user_attrs.get(_ATTRIBUTE), SharedTrial)
        except (msgspec.ValidationError, InputError) as error:
            raise InputError(
                f"--storage {self.place}: trial {row.number} of study '{self._study.study_name}' was not written by this program"
                f" ({error}); choose another --storage or --seed"
            ) from error

    def _patiently(self, call: Callable[[], _T], patience_s: float = PATIENCE_S) -> _T:
        """Call until it succeeds: connections break, locks time out, servers restart. A row that is inserted twice counts once."""
        give_up_s = time.monotonic() + patience_s
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                return call()
            except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
                if time.monotonic() + pause_s > give_up_s:
                    raise MissingCapabilityError(
                        f"--storage {self.place}: cannot be used ({_reason(error)}); repair it and run the same command to continue"
                    ) from error
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, longest_s)


def without_password(url: str) -> str:
    """An address without its password; raises `InputError` if it is not an address."""
    parsed = _parsed(url)
    return parsed.difference_update_query(_SECRETS).render_as_string(hide_password=True)


def waits_for_the_disk(url: str) -> bool:
    """Whether a storage syncs a local file for every trial, which the journal of a run folder does not."""
    return _parsed(url).get_backend_name() in ("sqlite", _JOURNAL)


def _parsed(url: str) -> sqlalchemy.URL:
    try:
        return sqlalchemy.make_url(url)
    except sqlalchemy.exc.ArgumentError as error:
        raise InputError(f"--storage {url}: not an address; write it like postgresql://user@host/database") from error


def _storage(url: str) -> optuna.storages.BaseStorage:
    parsed = _parsed(url)
    place = without_password(url)
    if parsed.drivername == _JOURNAL:
        if parsed.host or not parsed.database:
            raise InputError(f"--storage {place}: a file is written with three slashes: journal:///folder/file")
        try:
            return optuna.storages.JournalStorage(JournalFileBackend("/" + parsed.database.lstrip("/")))
        except OSError as error:
            raise MissingCapabilityError(f"--storage {place}: cannot be written ({error.strerror})") from error
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    options = {"connect_args": {"timeout": PATIENCE_S}} if parsed.get_backend_name() == "sqlite" else {}
    try:
        return optuna.storages.RDBStorage(parsed.render_as_string(hide_password=False), engine_kwargs=options)
    except (sqlalchemy.exc.NoSuchModuleError, sqlalchemy.exc.ArgumentError) as error:
        raise InputError(f"--storage {place}: no such kind of storage ({_reason(error)})") from error
    except ImportError as error:
        extra = "; pip install 'dpro-search[postgresql]'" if "postgresql" in parsed.drivername else ""
        raise MissingCapabilityError(f"--storage {place}: its Python package is not installed ({error}){extra}") from error


def _reason(error: BaseException) -> str:
    """The innermost cause, in one line: the message of the database."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class PlanParams:
    """Plans as Optuna's named parameters, for its dashboard, plots and importances; searches do not read them.

    A job has one parameter for each field, in every trial, because Optuna compares only parameters that all have.

    A field that a plan leaves as recorded has the recorded value. Fields that name tensors, ops or modules are counted. A number
    outside the values that the space offers is shown as the nearest of them.

    Attributes
    ----------
    distributions
        By name; equal for all plans of the space.
    """

    def __init__(self, space: PlanSpace) -> None:
        self._recorded = space.job.values
        offered: dict[str, list[Any]] = {name: [] for name in space.fields}
        for choice in space.choices:
            for point in (point for points in choice.grids.values() for point in points):
                for name, value in point.items():
                    offered[name].append(value)
        self.distributions: Mapping[str, BaseDistribution] = {
            name: _distribution([*values, *([self._recorded[name]] if self._recorded.get(name) is not None else [])])
            for name, values in offered.items()
        }

    def of(self, plan: Plan) -> dict[str, Any]:
        """Values of all parameters for a plan."""
        return {name: self._value(name, plan.get(name)) for name in self.distributions}

    def _value(self, name: str, value: Any) -> Any:
        value = self._recorded.get(name) if value is None else value
        distribution = self.distributions[name]
        if isinstance(distribution, CategoricalDistribution):
            return value if value in distribution.choices else distribution.choices[0]
        assert isinstance(distribution, IntDistribution | FloatDistribution)
        number = len(value) if isinstance(value, tuple) else value or 0
        return min(max(number, distribution.low), distribution.high)


def _distribution(values: list[Any]) -> BaseDistribution:
    """The distribution that holds the values of a field."""
    if any(isinstance(value, str) for value in values):
        return CategoricalDistribution((_NONE, *sorted({value for value in values if isinstance(value, str)})))
    if any(isinstance(value, bool) for value in values):
        return CategoricalDistribution((False, True))
    numbers: list[int | float] = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return IntDistribution(0, _MOST_NAMED)
    low, high = min(numbers), max(numbers)
    log = low > 0 and high / low >= _LOG_FROM
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)
