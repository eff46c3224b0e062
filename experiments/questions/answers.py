"""`answered`: one question, the command that asks it, the answer, and whether what came out agrees with it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scipy.stats import kendalltau

from dpro_search.analysis.expect import expect
from dpro_search.errors import DproSearchError
from dpro_search.kinds import JobInScenario, job_of, load_source
from dpro_search.space.plan import Plan
from experiments.questions.names import FOLDER, known_as

_NUMBERS: Mapping[str, str] = {
    "tokens_per_second": "tokens_per_second={}",
    "tokens_per_second_per_device": "tokens_per_second_per_device={}",
    "samples_per_second": "samples_per_second={}",
    "one_host_samples_per_second": "one_host_samples_per_second={}",
    "step_time_s": "step_time={}s",
    "mfu_pct": "mfu={}%",
    "tflops_per_device": "flops_per_device={}TFLOP/s",
    "memory_gib": "memory={}GiB",
}
"""Measured numbers of a question, as ``--measured`` takes them. Others cannot be given: they are of another number of devices."""


_IN_FILE = ("attention", "compiled")
"""Keys of a job's file that no ``--set`` changes."""


_OWN_FILE = re.compile(rf"{re.escape(str(FOLDER))}/tmp\w+/job\.toml")  # what the command's file is while it is answered


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer beside what came out.

    Attributes
    ----------
    question
        The table of ``questions.toml``.
    command
        The command line that asks it, from this folder; the job's file is ``ID.toml``.
    said
        The answer, in words.
    outcome
        What came out, in words.
    agrees
        Whether what came out lies within the answer; None: it was refused.
    error
        Of a number: predicted over measured, less 1; None: no number.
    rank, certainty
        Of a cause: its place among the answered ones (None: not among them), and the probability of the most probable wrong one.
    """

    question: Mapping[str, Any]
    command: str
    said: str
    outcome: str
    agrees: bool | None
    error: float | None = None
    rank: int | None = None
    certainty: float | None = None

    @property
    def kind(self) -> str:
        """The kind of question."""
        return str(self.question["kind"])


def answered(question: Mapping[str, Any]) -> Answer:
    """The answer to a question; one that is refused says why."""
    try:
        return {"time": _time, "memory": _memory, "fits": _fits, "cause": _cause, "ranking": _ranking}[question["kind"]](question)
    except DproSearchError as error:
        text = _OWN_FILE.sub(f"{question['id']}.toml", str(error))
        outcome = str(question["outcome"].get("value", question["outcome"].get("cause", question["outcome"].get("order"))))
        agrees = None
        if (
            question["kind"] == "cause"
            and known_as(question["outcome"]["cause"]) == "counted-otherwise"
            and "counted otherwise" in text
        ):
            agrees = True  # the numbers contradict each other, and the line says why
        rank = 1 if agrees else None
        return Answer(question=question, command=_command(question), said=text, outcome=outcome, agrees=agrees, rank=rank)


@contextmanager
def _job(text: str) -> Iterator[JobInScenario]:
    """The job of a text whose paths are from this folder."""
    with TemporaryDirectory(dir=FOLDER) as folder:
        for name in ("models", "clusters"):
            (Path(folder) / name).symlink_to(FOLDER / name)
        path = Path(folder) / "job.toml"
        path.write_text(text)
        yield job_of(load_source(path))


def _measured(question: Mapping[str, Any]) -> list[str]:
    numbers = [_NUMBERS[name].format(value) for name, value in question.get("measured", {}).items() if name in _NUMBERS]
    idle = question.get("measured", {}).get("gpu_idle_pct")
    return [*numbers, *([] if idle is None else [f"utilisation={100 - idle}%"])]


def _command(question: Mapping[str, Any]) -> str:
    words = ["dpro-search", "expect", f"{question['id']}.toml"]
    if question["kind"] == "cause":
        words += [word for text in _measured(question) for word in ("--measured", text)]
    if question["kind"] == "ranking":  # of changes that only the file can say, each has a file of its own
        return "; ".join(
            shlex.join(
                [
                    "dpro-search",
                    "replay",
                    f"{question['id']}.toml",
                    *(word for part in _settings(change) for word in ("--set", part)),
                ]
            )
            for change in question.get("changes", ())
        ) or "; ".join(f"dpro-search replay {question['id']}-{number}.toml" for number in range(len(question["jobs"])))
    return shlex.join(words)


def _time(question: Mapping[str, Any]) -> Answer:
    outcome = question["outcome"]
    with _job(question["job"]) as job:
        answer = expect(job, [_NUMBERS[outcome["quantity"]].format(outcome["value"])])
    low, high = answer.interval
    scale = 1e-6 if outcome["quantity"] == "step_time_s" else 1.0
    unit = "s" if outcome["quantity"] == "step_time_s" else outcome["quantity"].replace("_", " ")
    return Answer(
        question=question,
        command=_command(question),
        said=f"{answer.expected * scale:.4g} ({low * scale:.4g} to {high * scale:.4g}) {unit}",
        outcome=f"{outcome['value']:g} {unit}",
        agrees=low <= (answer.measured or math.nan) <= high,
        error=answer.expected / (answer.measured or math.nan) - 1,
    )


def _memory(question: Mapping[str, Any]) -> Answer:
    measured = question["outcome"]["value"] * 2**30
    with _job(question["job"]) as job:
        value = expect(job).values["memory_bytes"]
    low, high = value.interval
    return Answer(
        question=question,
        command=_command(question),
        said=f"{value.expected / 2**30:.1f} ({low / 2**30:.1f} to {high / 2**30:.1f}) GiB",
        outcome=f"{question['outcome']['value']:g} GiB",
        agrees=low <= measured <= high,
        error=value.expected / measured - 1,
    )


def _fits(question: Mapping[str, Any]) -> Answer:
    with _job(question["job"]) as job:
        prediction = job.predict(Plan())
    fits, came_out = prediction.infeasible is None, bool(question["outcome"]["value"])
    return Answer(
        question=question,
        command=_command(question).replace("expect", "replay"),
        said="it fits" if fits else f"it {prediction.infeasible}",
        outcome="it ran" if came_out else "out of memory",
        agrees=fits == came_out,
    )


def _cause(question: Mapping[str, Any]) -> Answer:
    true = known_as(question["outcome"]["cause"])
    with _job(question["job"]) as job:
        answer = expect(job, _measured(question))
    names = [cause.name for cause in answer.causes]
    rank = next((place for place, name in enumerate(names, 1) if true in name.split("+")), None)
    wrong = max(
        (cause.probability for cause in answer.causes if true not in cause.name.split("+") and cause.name != "none"), default=0.0
    )
    first = ", ".join(f"{cause.name} {cause.probability:.0%}" for cause in answer.causes[:3])
    return Answer(
        question=question,
        command=_command(question),
        said=f"{answer.verdict}: {first}",
        outcome=true,
        agrees=rank is not None and rank <= 3,
        rank=rank,
        certainty=wrong,
    )


def _ranking(question: Mapping[str, Any]) -> Answer:
    """The order of settings by predicted throughput."""
    outcome = question["outcome"]
    keys = list(question.get("changes") or range(len(question["jobs"])))
    rates = {}
    for key in keys:
        with _job(_changed(question["job"], key) if isinstance(key, str) else question["jobs"][key]) as job:
            here, plan = job.under(job.job.scenario(_settings(key))) if isinstance(key, str) else (job, Plan())
            prediction = here.predict(plan)
            work = here.work
            samples = (work.tokens if work is not None else None) or 1.0
            rates[key] = samples / prediction.iteration_us * 1e6 if prediction.infeasible is None else 0.0
    order = sorted(keys, key=lambda key: -rates[key])
    true = list(outcome["order"])
    tau = kendalltau([true.index(key) for key in keys], [order.index(key) for key in keys]).statistic
    return Answer(
        question=question,
        command=_command(question),
        said=f"{' > '.join(map(str, order))} (Kendall tau {tau:.2f})",
        outcome=" > ".join(map(str, true)),
        agrees=order[0] == true[0],
    )


def _settings(change: str) -> tuple[str, ...]:
    return tuple(part for part in change.split(",") if part.partition("=")[0] not in _IN_FILE)


def _changed(text: str, change: str) -> str:
    """The job's text with what only the file can say."""
    lines = text.strip().splitlines()
    for part in change.split(","):
        name, _, value = part.partition("=")
        if name in _IN_FILE:
            lines = [line for line in lines if line.partition("=")[0].strip() != name]
            lines.insert(0, f"{name} = {value if value in ('true', 'false') else repr(value)}")
    return "\n".join(lines)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """The figures of the page."""
    numbers = [one for one in answers if one.kind in ("time", "memory")]
    errors = sorted(abs(one.error) for one in numbers if one.error is not None)
    causes = [one for one in answers if one.kind == "cause"]
    return {
        "questions": len(answers),
        "refused": sum(one.agrees is None for one in answers),
        "numbers_inside_interval": f"{sum(bool(one.agrees) for one in numbers)} of {len(numbers)}",
        "median_error_pct": round(errors[len(errors) // 2] * 100, 1) if errors else None,
        "fits_right": _share(answers, "fits"),
        "best_of_order_right": _share(answers, "ranking"),
        "cause_first": f"{sum(one.rank == 1 for one in causes)} of {len(causes)}",
        "cause_among_three": _share(answers, "cause"),
        "wrong_cause_above_80_pct": sum((one.certainty or 0.0) > 0.8 for one in causes),
        "agree": f"{sum(bool(one.agrees) for one in answers)} of {len(answers)}",
    }


def _share(answers: Sequence[Answer], kind: str) -> str:
    those = [one for one in answers if one.kind == kind]
    return f"{sum(bool(one.agrees) for one in those)} of {len(those)}"
