"""`Byteps`: a job of MXNet with BytePS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dpro_search.kinds._answers import per_byte
from dpro_search.kinds._diagnosis import Diagnosis, PredictedGain, RankFacts, Table
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
from dpro_search.quantities import percent_text, size_text, typeset_time_text
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from dpro_search.space.servers.byteps_job import BytepsJob, byteps_graph
from dpro_search.space.servers.byteps_recorded import recorded_byteps_job
from dpro_search.space.servers.placement import on_workers
from dpro_search.space.servers.store_job import goodput_bytes_per_us
from dpro_search.space.transformations import (
    BytepsCompression,
    Credit,
    PlanningFacts,
    PlanSpace,
    ServerCount,
    ServerPlacement,
    TensorPartition,
    Transformation,
    byteps_under,
)

_ITERATIONS = 16  # of a replay that answers one of many questions
_VARIABLES = {"servers": "DMLC_NUM_SERVER", "partition_bytes": "BYTEPS_PARTITION_BYTES"}


class Byteps(ParameterServerJob[BytepsJob]):
    """Servers, their hosts, partition size, credit and compression of BytePS."""

    title = "a job with BytePS"
    askable = ("servers", "servers_on_workers", "partition_bytes", "credit", "compression")
    error_bar = "byteps"

    _recorded = staticmethod(recorded_byteps_job)
    _under = staticmethod(byteps_under)
    _built = staticmethod(byteps_graph)
    _goodput = staticmethod(goodput_bytes_per_us)

    def _plans_of(self, job: BytepsJob, *, allow_lossy: bool) -> PlanSpace:
        values = {
            "servers": len(job.server_core),
            "servers_on_workers": on_workers(len(job.workers), job.server_host),
            "partition_bytes": job.partition_bytes,
            "credit": job.credit,
        }
        facts = PlanningFacts(name=self.title, tensors=self.tensors, values=values)
        placement = ServerPlacement(facts, limited=job.bytes_per_us is not None)
        transformations: list[Transformation] = [TensorPartition(facts), Credit(facts), ServerCount(facts), placement]
        if allow_lossy:
            transformations.append(BytepsCompression(facts, [tensor.dtype for tensor in self.tensors], job.recorded_compression))
        return PlanSpace(facts, transformations)

    def _cost_rows(self, job: BytepsJob) -> tuple[tuple[str, str, str], ...]:
        return (
            ("CPU time", per_byte(job.cpu_us_per_byte), "of a process, for the bytes that it sends, receives or adds"),
            ("message", typeset_time_text(job.message_us), "CPU time of one message, independent of its size"),
            ("before a push", typeset_time_text(job.reduce_us + job.before_push_us), "stages of the worker that use no CPU"),
            ("reply", typeset_time_text(job.reply_us), "time until a message is acknowledged"),
            ("after a pull", typeset_time_text(job.after_pull_us), "time from the arrival of the sum to its use"),
            ("polling, workers", percent_text(job.worker_polling * 100), "share of one core of each"),
            ("polling, servers", percent_text(job.server_polling * 100), "share of one core of each"),
        )

    def questions(self, scenario: Scenario) -> Mapping[str, Plan]:
        return _questions(self.unplanned_job(scenario))

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        return _diagnosis(self, here)

    def _messages(self, job: BytepsJob) -> Iterable[tuple[int, int, float]]:
        return ((part.server, tensor, part.size_bytes) for tensor in range(len(job.tensor_bytes)) for part in job.parts(tensor))


class BytepsServer(ServerFacts, frozen=True, kw_only=True):
    """The load of a server, by the partitions that are hashed to it."""

    partitions: int


class BytepsDiagnosis(ServerDiagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a job with BytePS."""

    servers: tuple[BytepsServer, ...]

    @property
    def server_table(self) -> Table:
        rows = [
            (str(row.server), str(row.partitions), size_text(row.size_bytes), percent_text(row.share_pct)) for row in self.servers
        ]
        return Table(title="what the servers sum", columns=("server", "partitions", "sums", "share"), rows=rows)


def _diagnosis(job: ParameterServerJob[BytepsJob], here: JobInScenario) -> ServerDiagnosis:
    """The diagnosis of a job with BytePS."""
    processes = job.unplanned_job(here.scenario)
    servers = _server_facts(processes)

    def kind_facts(timeline: Timeline, plan_gains: Sequence[PredictedGain]) -> KindFacts:
        ranks = tuple(RankFacts(rank=rank, host=host) for rank, host in enumerate(job.hosts(here.scenario)))
        return KindFacts(ranks, servers, _findings(processes, servers, plan_gains))

    return diagnosis_of_servers(job, here, BytepsDiagnosis, kind_facts, _ITERATIONS)


def _server_facts(job: BytepsJob) -> tuple[BytepsServer, ...]:
    parts = [part for tensor in range(len(job.tensor_bytes)) for part in job.parts(tensor)]
    total = float(job.tensor_bytes.sum())
    rows = []
    for server in range(len(job.server_core)):
        sizes = [part.size_bytes for part in parts if part.server == server]
        held = sum(sizes)
        rows.append(BytepsServer(server=server, partitions=len(sizes), size_bytes=held, share_pct=held / total * 100))
    return tuple(rows)


def _questions(job: BytepsJob) -> dict[str, Plan]:
    """Other values of the knobs, by what they are called."""
    servers, sizes = len(job.server_core) + 1, (job.partition_bytes // 4, job.partition_bytes * 4)
    questions = {**other_placement(job), f"servers={servers}": Plan(servers=servers)}
    return questions | {f"partition_bytes={size}": Plan.of(partition_bytes=size) for size in sizes if size}


def _findings(job: BytepsJob, servers: Sequence[BytepsServer], plan_gains: Sequence[PredictedGain]) -> list[str]:
    """Sentences with numbers and the knob to turn."""
    sentences = knob_finding(plan_gains, _variable)
    sentences += spread_finding(servers, "sums", "smaller BYTEPS_PARTITION_BYTES or another BYTEPS_KEY_HASH_FN")
    if job.worker_polling > 0.05:
        sentences.append(
            f"Looking for work takes {job.worker_polling * 100:.0f} % of each worker's core: give BytePS a core of its own."
        )
    return sentences


def _variable(change: str) -> str:
    key, _, value = change.partition("=")
    return f"{_VARIABLES[key]}={value}"
