"""What profiles lack is told in one line each, with what can still be asked; what is of two jobs is refused."""

import pytest
from importer_kit import shared_traces
from kineto_files import COLLECTIVES, START, collective_job, distributed, small_job

from dpro_search._text import numbers_text
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.readers.kineto.importer import read
from dpro_search.errors import InputError


def warnings_of(*paths):
    return read(list(paths)).meta.warnings


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((3,), "3"), ((1, 2), "1, 2"), ((0, 1, 2, 5), "0 to 2, 5"), (range(1, 40, 2), "1, 3, 5, 7, 9, 11, 13, 15 ...")],
)
def test_many_numbers_are_runs_and_an_ellipsis(numbers, text):
    assert numbers_text(numbers) == text


def test_missing_ranks_are_named(tmp_path):
    path = small_job().write(tmp_path / "trace.json", header=distributed(0, 16))
    assert "the job has 16 ranks, but only rank 0 was imported: how long collectives wait for ranks 1 to 15" in warnings_of(path)[0]


def test_warnings_of_many_ranks_are_one(tmp_path):
    paths = []
    for rank in range(6):
        profile = small_job()
        for _ in range(rank % 2):
            profile.kernel("early", START + 15, 4)
        paths.append(profile.write(tmp_path / f"rank{rank}.json", header=distributed(rank, 6)))
    warnings = [text for text in warnings_of(*paths) if "before the profiler's window" in text]
    assert warnings == ["3 ranks (1, 3, 5): 1 device ops were launched before the profiler's window: they belong to no step"]


def test_a_job_of_several_ranks_without_collectives(tmp_path):
    paths = [small_job().write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2)) for rank in range(2)]
    assert any(text.startswith("the profile has no kernel of a known communication library") for text in warnings_of(*paths))
    assert not any("NCCL" in text for text in warnings_of(small_job().write(tmp_path / "one.json")))


def test_inference_is_told_from_training(tmp_path):
    def told(profile):
        return any("inference" in text for text in warnings_of(profile.write(tmp_path / "trace.json")))

    training = small_job()
    training.op("AddmmBackward0", START + 40, 5)
    assert told(small_job())
    assert not told(training)


def test_a_step_that_was_cut_off_is_left_out(tmp_path):
    profile = small_job(steps=4)
    whole = read([profile.write(tmp_path / "whole.json")])
    profile.step(4, START + 800, 190)
    for at in range(4):
        profile.kernel("more", START + 100 + 200 * at, 10, launched=START + 50 + 200 * at)
        profile.kernel("more", START + 111 + 200 * at, 10, launched=START + 51 + 200 * at)
    profile.kernel("gemm", START + 820, 40, launched=START + 810)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert sorted(set(whole.steps.index.tolist())) == sorted(set(trace.steps.index.tolist())) == [0, 1, 2, 3]
    assert any(text.startswith("rank 0: step 4 has 1 device ops, the others 4: it was cut off") for text in trace.meta.warnings)


def test_collectives_of_an_unknown_type_are_counted(tmp_path):
    profile = collective_job(0, parts=2)
    profile.kernel("ncclDevKernel_Frobnicate_f32(ncclWork*)", START + 950, 20, launched=START + 940, stream=COLLECTIVES)
    (warning,) = (text for text in warnings_of(profile.write(tmp_path / "trace.json")) if "unknown type" in text)
    assert warning.startswith("1 collective is of an unknown type (")
    assert "communication=0" in warning


@pytest.mark.parametrize(
    "other",
    [
        {"nccl_version": "2.99.1"},
        {"backend": "gloo"},
        {"pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [4, 5]}]},
    ],
)
def test_ranks_of_two_jobs_are_refused(tmp_path, other):
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}

    def written(rank, **more):
        info = distributed(rank, 2)["distributedInfo"] | {"nccl_version": "2.17.1", "pg_config": [group]} | more
        return collective_job(rank).write(tmp_path / f"rank{rank}.json", header={"distributedInfo": info})

    assert read([written(0), written(1)]).meta.ranks == 2
    with pytest.raises(InputError, match=r"rank1\.json: distributedInfo has another .*; import one job at a time") as error:
        read([written(0), written(1, **other)])
    assert "\n" not in str(error.value)


def test_ranks_whose_collectives_differ_in_bytes_are_of_two_jobs(tmp_path):
    """Profiles that do not say of which job they are."""

    def written(rank, elements):
        sizes = {"In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float", "Collective name": "allreduce"}
        return collective_job(rank, **sizes).write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2))

    assert read([written(0, 1000), written(1, 1000)]).meta.ranks == 2
    with pytest.raises(InputError, match=r"10 of 10 collectives of ranks 0, 1 differ in bytes.*import one job at a time$") as error:
        read([written(0, 1000), written(1, 2000)])
    assert "\n" not in str(error.value)


def test_real_ranks_keep_their_numbers():
    folder = shared_traces() / "kineto_single"
    for name, numbers, world in (("torchrec_a100_rank3of8", (3,), 8), ("ddp_resnet50_a100_rank0of2", (0,), 2)):
        meta = import_trace([folder / f"{name}.json.gz"]).meta
        assert (meta.numbers, meta.world_size, meta.hosts) == (numbers, world, ("",))
