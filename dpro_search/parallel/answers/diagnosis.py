"""Facts, tables and sentences on the step of a parallel job: stages, findings, memory, why one plan is faster than another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds._answers import STEP_PARTS, Remedy
from dpro_search.kinds._diagnosis import Diagnosis, PredictedGain, RankFacts, Table, critical_table, gain_table
from dpro_search.parallel.answers.accuracy import accuracy
from dpro_search.parallel.costs.domain import Domain
from dpro_search.parallel.strategy import Strategy
from dpro_search.quantities import size_text, time_text
from dpro_search.replay.path.findings import costliest
from dpro_search.replay.sentences import share
from dpro_search.replay.timeline import Timeline
from dpro_search.space.scenario import SCALES

_MOST_ROWS = 16
WORDS: Mapping[str, str] = {
    "compute": "computation",
    "optimizer": "the optimizer's update",
    "bubble": "the pipeline's bubble",
    "host": "waiting for the host",
    "exposed_data_parallel": "exposed data parallel communication",
    "exposed_pipeline_sends": "exposed sends between stages",
    "exposed_expert_parallel": "exposed expert parallel communication",
    "exposed_context_parallel": "exposed context parallel communication",
    "exposed_tensor_parallel": "exposed tensor parallel communication",
}
_WORTH = 0.005  # of a step; smaller differences are not named
_MOST_PARTS = 2
_SURE = 0.9  # share of pairs in the predicted order, from which an order is not doubted
_SPANS = {int(OpKind.FORWARD): "forward", int(OpKind.BACKWARD): "backward", int(OpKind.UPDATE): "update"}
_PASS = re.compile(r"(?P<before>.* )?(?P<direction>[FBIW])\d+( of (layer \d+ of )?stage (?P<stage>\d+))?$")
_COLLECTIVES = {  # of layers' passes, and messages between stages, by the words before the pass
    "gather for ": "all-gathers of parameters",
    "reduce of ": "reductions of gradients",
    "collectives of ": "collectives within passes",
    "send ": "sends to the next stage",
    "receives ": "receives from the stage before",
}
_PASSES = {
    "F": "forward passes",
    "B": "backward passes",
    "I": "backward passes for inputs",
    "W": "backward passes for weights",
}


class ParallelDiagnosis(Diagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a described parallel job; see `kinds._answers.ParallelFacts`."""

    breakdown_us: Mapping[str, float]
    peak_memory_bytes: int | None
    strategy: Mapping[str, object]
    computation_us: Mapping[str, float]
    memory_bytes: Mapping[str, float]
    infeasible: str | None
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]

    @property
    def tables(self) -> Sequence[Table]:
        stages = [
            (str(row.host), str(row.alike), *(time_text(row.parts_us[part]) for part in ("passes", "optimizer", "waits")))
            for row in self.ranks[:_MOST_ROWS]
        ]
        memory = [(name, size_text(size)) for name, size in self.memory_bytes.items() if size]
        parts_us = {**self.computation_us, **{name: us for name, us in self.breakdown_us.items() if name != "compute"}}
        parts = [(STEP_PARTS[name], time_text(us)) for name, us in parts_us.items()]
        return (
            Table(title="iteration", columns=("part", "time"), rows=parts),
            Table(title="memory of the rank that needs most", columns=("for", "size"), rows=memory),
            Table(title="pipeline stages", columns=("stage", "ranks", "passes", "optimizer", "waits"), rows=stages),
            critical_table(self.critical_ops),
            gain_table(self.gains, self.iteration_us),
        )


def stage_facts(timeline: Timeline, strategy: Strategy) -> tuple[RankFacts, ...]:
    """Times of one rank of each pipeline stage. All ranks of a stage do the same."""
    graph = timeline.graph
    alike = strategy.devices // strategy.pp
    stages = []
    for stage in range(strategy.pp):
        of_stage = graph.rank_of_op == stage
        passes_us = float(graph.duration_us[of_stage & np.isin(graph.op_kind, (OpKind.FORWARD, OpKind.BACKWARD))].sum())
        update_us = float(graph.duration_us[of_stage & (graph.op_kind == OpKind.UPDATE)].sum())
        waits_us = max(timeline.iteration_us - passes_us - update_us, 0.0)
        stages.append(
            RankFacts(
                rank=stage * alike,
                host=f"stage {stage}",
                alike=alike,
                breakdown_us={"passes": passes_us, "optimizer": update_us, "waits": waits_us},
                last_pct=None,
                waited_us=waits_us,
            )
        )
    return tuple(stages)


def stage_spans(timeline: Timeline, stages: int) -> list[dict[str, list[tuple[float, float]]]]:
    """For each pipeline stage, when it is in which kind of pass, and when it only communicates, in us."""
    graph, times = timeline.graph, timeline.times
    rows: list[dict[str, list[tuple[float, float]]]] = [{key: [] for key in ("comm", *_SPANS.values())} for _ in range(stages)]
    for op in range(len(graph)):
        start_us, end_us = float(times.start_us[op]), float(times.end_us[op])
        if (stage := int(graph.rank_of_op[op])) >= 0 and end_us > start_us:
            rows[stage][_SPANS.get(int(graph.op_kind[op]), "comm")].append((start_us, end_us))
    return rows


def pass_name(op: str) -> str:
    """The passes or exchanges of a stage to which an op of a step's graph belongs, or the op's own name."""
    match = _PASS.match(op)
    if match is None:
        return op
    before = match["before"]
    what = _PASSES[match["direction"]] if before is None else _COLLECTIVES.get(before, before.strip())
    return what + (f" of stage {match['stage']}" if match["stage"] else "")


def findings(breakdown_us: Mapping[str, float], gains: Sequence[PredictedGain]) -> list[str]:
    """Sentences: parts of the step beside computation, the costliest first, then the best change."""
    step_us = sum(breakdown_us.values())
    parts = [(us, f"{_capital(WORDS[name])} takes {share(us, step_us)}.") for name, us in breakdown_us.items() if name != "compute"]
    changes = [gain for gain in gains if gain.gain_us > 0 and not gain.what_if.startswith(SCALES)]
    best = [(gain.gain_us, f"'{gain.what_if}' would gain {share(gain.gain_us, step_us)}.") for gain in changes[:1]]
    return [*costliest(parts, step_us), *costliest(best, step_us)]


def memory_sentence(memory: Mapping[str, float], limit_bytes: int | None, remedies: Sequence[Remedy]) -> str:
    """Memory of the rank that needs most and, if a device has less, the fastest change that fits."""
    total = sum(memory.values())
    most = max(memory, key=lambda name: memory[name])
    of = "" if limit_bytes is None else f" of {size_text(limit_bytes)}"
    sentence = f"Memory of the rank that needs most: {size_text(total)}{of}, {size_text(memory[most])} of it for {most}"
    if limit_bytes is None or total <= limit_bytes:
        return f"{sentence}."
    if not remedies:
        return f"{sentence}: it does not fit, and no change of one or two settings is enough; 'dpro-search run' tries all."
    best = remedies[0]
    memory_then = "unknown memory" if best.peak_memory_bytes is None else size_text(best.peak_memory_bytes)
    then = f"{memory_then}, {time_text(best.predicted_iteration_us)} an iteration"
    return f"{sentence}: it does not fit. '{best.change}' would ({then})."


def host_sentences(needed_bytes: int, has_bytes: int | None) -> Iterator[str]:
    """Lines on the memory of the host that its ranks use in place of their devices'; none if they use none."""
    if needed_bytes:
        of = " of an unknown amount" if has_bytes is None else f" of {size_text(has_bytes)}"
        yield f"Memory of a host that its ranks use in place of their devices': {size_text(needed_bytes)}{of}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def comparison(name: str, than: str, own_us: Mapping[str, float], other_us: Mapping[str, float]) -> str:
    """A sentence: how much longer a step takes than another, to which parts it loses, and what it gains back.

    Parameters
    ----------
    name, than
        Of the slower and of the faster step.
    own_us, other_us
        Their parts.
    """
    total_us, base_us = sum(own_us.values()), sum(other_us.values())
    differences = {part: own_us.get(part, 0.0) - other_us.get(part, 0.0) for part in {*own_us, *other_us}}
    lost = _named({part: us for part, us in differences.items() if us > 0}, base_us, "to")
    won = _named({part: -us for part, us in differences.items() if us < 0}, base_us, "on")
    sentence = f"{name} takes {(total_us / base_us - 1) * 100:.1f} % longer than {than}"
    sentence += f": it loses {lost}" if lost else ""
    return sentence + (f", and gains {won}." if lost and won else ".")


def doubt(faster_us: float, slower_us: float, domain: Domain) -> str:
    """A sentence on how sure the order of two plans is, of which `domain` is the harder one; empty: sure."""
    share = accuracy().order_is_right(faster_us, slower_us, domain)
    if share >= _SURE:
        return ""
    pairs = f"of pairs of published runs that were predicted so close ({domain})"
    return f"The order of plans 1 and 2 is not certain: {pairs}, {share * 100:.0f} % were in the predicted order."


def _named(parts_us: Mapping[str, float], base_us: float, where: str) -> str:
    largest = sorted(parts_us.items(), key=lambda item: -item[1])[:_MOST_PARTS]
    return " and ".join(f"{us / base_us * 100:.1f} % {where} {WORDS[part]}" for part, us in largest if us >= _WORTH * base_us)
