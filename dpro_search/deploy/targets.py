"""Targets of plans: `targets_for` chooses those that a plan needs, `parts_of` gives the files of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dpro_search._text import listed
from dpro_search.deploy.parts.part import JobFacts, Part, Servers, Target
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan


def targets_for(plan: Plan, available: Sequence[Target], preferred: Target | None = None) -> tuple[Target, ...]:
    """The targets that together follow a plan, in the order of `available`.

    Parameters
    ----------
    available
        Those of the job's kind; all, where the kind is not known.
    preferred
        The default if several are possible; None: that is an error.

    Raises
    ------
    InputError
        No target can express a field of the plan, or several can.
    """
    able = {name: [target for target in available if name in target.fields] for name in plan.settings}
    chosen = {targets[0] for targets in able.values() if len(targets) == 1}
    for name, targets in able.items():
        if not targets:
            raise InputError(f"{name}: {_reason(name, available, available)}")
        frameworks = {target.framework for target in chosen if target.framework is not None}
        fitting = [target for target in targets if target.framework in frameworks]
        if not chosen & set(targets) and len(fitting) == 1:
            chosen.add(fitting[0])
        if not chosen & set(targets) and preferred in targets:
            chosen.add(preferred)
        if not chosen & set(targets):
            raise InputError(f"{name}: {', '.join(map(str, targets))} can express it; choose one with --target")
    if not chosen:
        chosen = {preferred} if preferred is not None else set(available[:1])  # the empty plan
    return tuple(target for target in available if target in chosen)


def targets_named(names: Sequence[str], known: Sequence[Target]) -> tuple[Target, ...]:
    """Targets by their names, of several with one name the first; raises `InputError` for an unknown one."""
    by_name = {target.name: target for target in reversed(known)}
    unknown = sorted({*names} - {*by_name})
    if unknown:
        raise InputError(f"target '{unknown[0]}' is unknown (known: {', '.join(dict.fromkeys(target.name for target in known))})")
    return tuple(by_name[name] for name in names)


def more_servers(plan: Plan, recorded: Servers) -> int:
    """Parameter servers of a plan that need hosts of their own beyond the recorded ones; 0 where no servers were recorded."""
    on_workers = recorded.on_workers if plan.servers_on_workers is None else plan.servers_on_workers
    if not recorded.count or on_workers:
        return 0
    count = recorded.count if plan.servers is None else plan.servers
    return max(count - (0 if recorded.on_workers else recorded.count), 0)


def parts_of(
    plan: Plan, targets: Sequence[Target], facts: JobFacts | None = None, known: Sequence[Target] = ()
) -> dict[Target, Part]:
    """The needs of each target.

    Parameters
    ----------
    known
        Other targets, for the error about a field that none of `targets` can express.

    Raises
    ------
    InputError
        A field that none of the targets can express, or not in this job; or targets that no job has together.
    """
    facts = facts or JobFacts()
    several = [target for target in targets if target.communicates]
    if len(several) > 1:
        raise InputError(f"--target {several[0]} and {several[1]}: a job communicates with one of them; leave out the others")
    of_framework = {target.framework: target for target in targets if target.framework is not None}
    if len(of_framework) > 1:
        one, other = list(of_framework.values())[:2]
        raise InputError(f"--target {one} and {other}: a job has one framework; leave out one of them")
    for name in plan.settings:
        if not any(name in target.fields for target in targets):
            raise InputError(f"{name}: {_reason(name, targets, known)}")
    return {target: target.part(plan, facts) for target in targets}


Change = Literal["environment", "script"]


def change_of(plan: Plan, available: Sequence[Target], facts: JobFacts) -> Change | None:
    """The change that a job needs in order to follow a plan: of its environment only, or of its script too. None: it cannot."""
    try:
        parts = parts_of(plan, targets_for(plan, available), facts)
    except InputError:
        return None
    return "script" if any(part.script for part in parts.values()) else "environment"


def _reason(name: str, targets: Sequence[Target], known: Sequence[Target]) -> str:
    reasons = [target.why_not[name] for target in targets if name in target.why_not]
    able = [target.name for target in dict.fromkeys((*known, *targets)) if name in target.fields]
    because = f"; {reasons[0]}" if reasons else ""
    others = f" (known to: {', '.join(able)}; choose with --target)" if able else ""
    return f"{listed([str(target) for target in targets]) or 'this job'} cannot express it{because}{others}"
