"""`comparison`: why one plan is faster than another, in words: which part of the step makes the difference."""

from __future__ import annotations

from collections.abc import Mapping

from dpro_search.parallel.answers.accuracy import accuracy
from dpro_search.parallel.costs.domain import Domain

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
