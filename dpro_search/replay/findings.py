"""What stands out in a job, as sentences with numbers and the knob to turn, the costliest first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro_search.collect.kernel_names import short_names
from dpro_search.graph.bus_bandwidth import GroupSpeed, slow_groups
from dpro_search.graph.device_time import Lateness, RankTime
from dpro_search.replay.sensitivity import Gain
from dpro_search.replay.sentences import WORTH_PCT


def findings(
    times: Sequence[RankTime],
    late: Sequence[Lateness],
    gains: Sequence[Gain],
    iteration_us: float,
    speeds: Sequence[GroupSpeed] = (),
) -> tuple[str, ...]:
    """Sentences on what costs at least 3 % of a step.

    Parameters
    ----------
    times, late
        Of every rank (see `graph.device_time`).
    gains
        Of questions about the job, largest first; the best one becomes a sentence.
    iteration_us
        Replayed, in us.
    speeds
        Of every group of ranks (see `graph.bus_bandwidth`).
    """
    found = [*_device(times), *_stragglers(late, times), *_slow_links(speeds, iteration_us)]
    found.sort(key=lambda finding: -finding[0])
    sentences = [sentence for share_pct, sentence in found if share_pct >= WORTH_PCT]
    best = max(gains, key=lambda gain: gain.gain_us, default=None)
    if best is not None and best.gain_us > 0:
        sentences.append(
            f"Of the changes asked about, '{short_names([best.change.text])[0]}' gains most: {best.gain_us / 1e3:.2f} ms "
            f"({best.gain_pct:.1f} %) of an iteration of {iteration_us / 1e3:.2f} ms."
        )
    return tuple(sentences)


def _device(times: Sequence[RankTime]) -> list[tuple[float, str]]:
    if not times:
        return []
    step = np.array([row.step_us for row in times])
    pct = {
        name: np.array([getattr(row, f"{name}_us") for row in times]) / step * 100
        for name in ("compute", "exposed_communication", "waiting_for_ranks", "idle", "host_bound")
    }
    mean = {name: float(share.mean()) for name, share in pct.items()}
    overlap = [row.overlapped_pct for row in times if row.overlapped_pct is not None]
    mostly = float((step * pct["host_bound"] / 100).mean()) / 1e3
    found = [
        (
            mean["host_bound"],
            f"Host-bound: devices idle {mean['host_bound']:.0f} % of a step ({mostly:.1f} ms) because nothing was launched; "
            "use CUDA graphs, larger batches or torch.compile, and for data loading more num_workers of the DataLoader.",
        ),
        (
            mean["exposed_communication"],
            f"Communication that nothing hides takes {mean['exposed_communication']:.0f} % of a step"
            + (f" ({float(np.mean(overlap)):.0f} % of the transfers are hidden)" if overlap else "")
            + "; try other buckets (DDP's bucket_cap_mb), compression (a communication hook) or a faster link.",
        ),
        (
            mean["idle"] - mean["host_bound"],
            f"Devices wait {mean['idle'] - mean['host_bound']:.0f} % of a step for other streams or between kernels; look for "
            "synchronisation, and for many short kernels to fuse.",
        ),
    ]
    worst = int(pct["waiting_for_ranks"].argmax())
    if mean["compute"] >= 80.0:
        found.append(
            (mean["compute"], f"Devices compute {mean['compute']:.0f} % of a step: faster kernels or lower precision pay first.")
        )
    found.append(
        (
            mean["waiting_for_ranks"],
            f"Ranks wait {mean['waiting_for_ranks']:.0f} % of a step for others to post a collective, "
            f"rank {times[worst].rank} most ({pct['waiting_for_ranks'][worst]:.0f} %); balance the work of the ranks.",
        )
    )
    return found


def _stragglers(late: Sequence[Lateness], times: Sequence[RankTime]) -> list[tuple[float, str]]:
    if not late or not times:
        return []
    worst = max(late, key=lambda row: row.cost_us)
    step_us = float(np.mean([row.step_us for row in times]))
    sentence = (
        f"Rank {worst.rank} comes last to {worst.last_pct:.0f} % of the collectives and costs the others "
        f"{worst.cost_us / 1e3:.2f} ms a step; look at its host, its input and its clocks."
    )
    return [(worst.cost_us / step_us * 100, sentence)]


def _slow_links(speeds: Sequence[GroupSpeed], iteration_us: float) -> list[tuple[float, str]]:
    found = []
    for speed, usual_bps in slow_groups(speeds):
        lost_us = speed.time_us * (1 - speed.bus_bps / usual_bps)
        ranks = ", ".join(map(str, speed.ranks[:8])) + ("..." if len(speed.ranks) > 8 else "")
        sentence = (
            f"Slow link: {speed.collective} among ranks {ranks} reaches {speed.bus_bps / 1e9:.1f} Gbit/s a link, the other groups "
            f"{usual_bps / 1e9:.1f}; it costs {lost_us / 1e3:.2f} ms a step. Look at these ranks' links and NCCL_IB_HCA or "
            "NCCL_SOCKET_IFNAME, or place them closer together."
        )
        found.append((lost_us / iteration_us * 100, sentence))
    return found
