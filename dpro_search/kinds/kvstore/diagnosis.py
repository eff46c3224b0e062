"""Facts and findings of `diagnose` for a job of MXNet with a KVStore."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.kinds._diagnosis import PredictedGain, RankFacts, Table
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds.servers.diagnosis import (
    KindFacts,
    ServerDiagnosis,
    ServerFacts,
    diagnosis_of_servers,
    knob_finding,
    other_placement,
    spread_finding,
)
from dpro_search.kinds.servers.job import ParameterServerJob
from dpro_search.quantities import percent_text, size_text, time_text
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan
from dpro_search.space.servers.kvstore_job import KvstoreJob, process_loads


class ProcessFacts(RankFacts, frozen=True, kw_only=True, omit_defaults=True):
    """Load of a worker or server, and of its link, in an iteration; `link_pct` is None where the link has no limit."""

    role: str
    core_us: float
    sent_bytes: float
    received_bytes: float
    link_pct: float | None

    @property
    def title(self) -> str:
        return f"rank {self.rank}" if self.role == "worker" else f"{self.role}, rank {self.rank}"


class KvstoreServer(ServerFacts, frozen=True, kw_only=True):
    """The parameters that a server holds, and the load of its process."""

    keys: int
    slices: int
    rank: int
    core_us: float
    link_pct: float | None


class KvstoreDiagnosis(ServerDiagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a job with a KVStore."""

    ranks: tuple[ProcessFacts, ...]
    servers: tuple[KvstoreServer, ...]

    @property
    def server_table(self) -> Table:
        rows = [
            (
                str(row.server),
                str(row.keys),
                str(row.slices),
                size_text(row.size_bytes),
                time_text(row.core_us),
                "no limit" if row.link_pct is None else percent_text(row.link_pct),
            )
            for row in self.servers
        ]
        return Table(title="what the servers have", columns=("server", "keys", "slices", "holds", "core", "link busy"), rows=rows)


def diagnosis(job: ParameterServerJob[KvstoreJob], here: JobInScenario) -> ServerDiagnosis:
    """The diagnosis of a job with a KVStore."""
    processes = job.unplanned_job(here.scenario)

    def kind_facts(timeline: Timeline, plan_gains: Sequence[PredictedGain]) -> KindFacts:
        ranks = _rank_facts(processes, job.hosts(here.scenario), timeline.iteration_us)
        servers = _server_facts(processes, ranks[len(processes.workers) :])
        return KindFacts(ranks, servers, _findings(ranks, servers, plan_gains, timeline.iteration_us))

    return diagnosis_of_servers(job, here, KvstoreDiagnosis, kind_facts)


def _rank_facts(job: KvstoreJob, hosts: Sequence[str], iteration_us: float) -> tuple[ProcessFacts, ...]:
    return tuple(
        ProcessFacts(
            rank=rank,
            host=host,
            role="worker" if rank < len(job.workers) else "server",
            core_us=load.core_us,
            sent_bytes=load.sent_bytes,
            received_bytes=load.received_bytes,
            link_pct=None if load.link_us is None else load.link_us / iteration_us * 100,
        )
        for rank, (host, load) in enumerate(zip(hosts, process_loads(job), strict=True))
    )


def _server_facts(job: KvstoreJob, processes: Sequence[ProcessFacts]) -> tuple[KvstoreServer, ...]:
    """Keys, slices and bytes of the parameters that each server holds."""
    slices = [(tensor, *part) for tensor, row in enumerate(job.slices) for part in row]
    total = float(job.tensor_bytes.sum())
    rows = []
    for server in range(len(job.server_core)):
        parts = [(tensor, size) for tensor, owner, size in slices if owner == server]
        held = sum(size for _, size in parts)
        rows.append(
            KvstoreServer(
                server=server,
                keys=len({tensor for tensor, _ in parts}),
                slices=len(parts),
                size_bytes=held,
                share_pct=held / total * 100,
                rank=processes[server].rank,
                core_us=processes[server].core_us,
                link_pct=processes[server].link_pct,
            )
        )
    return tuple(rows)


def questions(job: KvstoreJob) -> dict[str, Plan]:
    """Other values of the knobs, by what they are called."""
    slicing = job.slicing
    questions = {**other_placement(job), f"servers={slicing.servers + 1}": Plan(servers=slicing.servers + 1)}
    if slicing.priority:
        sizes = [size for size in (slicing.slice_threshold * 10, slicing.slice_threshold // 10) if size]
        return questions | {f"slice_threshold={size}": Plan.of(slice_threshold=size) for size in sizes}
    bound = max(slicing.bound // 10, 1)
    return questions | {
        f"bigarray_bound={bound}": Plan.of(bigarray_bound=bound),
        "p3=1, slice_threshold=400000": Plan.of(p3=True, slice_threshold=400_000),
    }


_VARIABLES = {
    "servers": "DMLC_NUM_SERVER",
    "bigarray_bound": "MXNET_KVSTORE_BIGARRAY_BOUND",
    "slice_threshold": "MXNET_KVSTORE_SLICE_THRESHOLD",
    "p3": "DMLC_PS_VAN_TYPE=p3 with update_on_kvstore=False",
}


def _findings(
    ranks: Sequence[ProcessFacts], servers: Sequence[KvstoreServer], plan_gains: Sequence[PredictedGain], iteration_us: float
) -> list[str]:
    """Sentences with numbers and the knob to turn."""
    sentences = spread_finding(servers, "has", "a smaller MXNET_KVSTORE_BIGARRAY_BOUND or priority slices (P3)")
    links = [(row.link_pct, row) for row in ranks if row.link_pct is not None]
    if links:
        link_pct, busiest = max(links, key=lambda link: link[0])
        if link_pct >= 50:
            sentences.append(
                f"The link of {busiest.role} {busiest.host} is busy {link_pct:.0f} % of an iteration of "
                f"{time_text(iteration_us)}: more servers (DMLC_NUM_SERVER), an even spread or a faster link."
            )
    return sentences + knob_finding(plan_gains, _variables)


def _variables(change: str) -> str:
    """The settings of MXNet that a change of knobs means."""
    return " and ".join(
        _VARIABLES[key] if key == "p3" else f"{_VARIABLES[key]}={value}"
        for key, _, value in (text.partition("=") for text in change.split(", "))
    )
