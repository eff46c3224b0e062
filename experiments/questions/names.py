"""Names of causes in public threads, and the names by which `dpro-search expect` knows them."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
KNOWN_AS = {
    "slow-network": "network-contention",
    "network-misconfigured": "network-contention",
    "slow-gpu-or-host": "slow-device-or-host",
    "offload-to-host": "optimizer-on-host",
    "padding": "counted-otherwise",
    "wrong-peak-flops": "counted-otherwise",
    "tokens-counted-otherwise": "counted-otherwise",
    "old-or-broken-software": "old-libraries",
    "memory-spills-or-fragments": "memory-fragments",
    "reduction-each-micro-batch": "sums-for-each-micro-batch",
    "host-oversubscribed": "host-bound",
    "garbage-collection": "host-bound",
    "host-bound-launches": "host-bound",
    "checkpointing-or-evaluation-in-window": "checkpoint-in-window",
    "recomputation": "recomputation-on",
    "contention-by-neighbours": "shared-devices",
}
"""A cause that is not named here is known by its own name, or not at all."""


def table(name: str) -> dict[str, Any]:
    """The content of one of the files of this folder."""
    return tomllib.loads((FOLDER / name).read_text("utf-8"))


def known_as(cause: str) -> str:
    """The name by which `expect` knows a cause."""
    return KNOWN_AS.get(cause, cause)


def threads_by_cause() -> Counter[str]:
    """In how many threads a job had each cause, by the names of `expect`."""
    counts: Counter[str] = Counter()
    for thread in table("causes.toml")["thread"]:
        causes = thread["cause"] if isinstance(thread["cause"], list) else [thread["cause"]]
        counts.update({known_as(cause) for cause in causes})
    return counts
