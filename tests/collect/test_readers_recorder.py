"""Folders of the recorder: which window and which ranks are read, and what the trace says of the job."""

import gzip
import json

import pytest
from importer_kit import check_trace
from kineto_files import collective_job, distributed

from dpro_search.collect.readers.importers import import_trace
from dpro_search.errors import InputError

RANKS = 2


def write_rank(folder, rank, window=0, /, **changed):
    """A rank's two files of a window; its description has what is `changed`."""
    place = folder / f"window{window}"
    place.mkdir(parents=True, exist_ok=True)
    plain = collective_job(rank).write(place / "plain", header=distributed(rank, RANKS))
    profile = place / f"rank{rank:05d}.json.gz"
    profile.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    job = {
        "format": "dpro-search recorder", "version": 1, "rank": rank, "world_size": RANKS, "window": window,
        "profile_bytes": profile.stat().st_size, "clocks": [{"wall_ns": 1_700_000_000_000_000_000, "monotonic_ns": 5}],
        "environment": {"NCCL_ALGO": "Ring", "RANK": str(rank)}, "versions": {"torch": "2.9.0"},
        "memory": {"rss_bytes": 100 + rank}, "models": [{"kind": "ddp", "bucket_cap_bytes": 1024}], "first_timed_step": 0,
        "step_us": [9000] * 5 + [100, 110, 120] + [5000] * 4 + [130, 140], "slowed_steps": [[8, 12]], **changed,
    }  # fmt: skip
    (place / f"rank{rank:05d}.job.json").write_text(json.dumps(job, separators=(",", ":")))
    return profile


def write_window(folder, window=0, **changed):
    for rank in range(RANKS):
        write_rank(folder, rank, window, **changed)


def test_a_folder_is_one_trace_with_what_the_ranks_say_of_the_job(tmp_path):
    write_window(tmp_path)
    trace = import_trace([tmp_path])
    check_trace(trace)
    meta = trace.meta
    assert (meta.format, meta.ranks, meta.world_size) == ("kineto", 2, 2)
    assert not any("left out" in warning for warning in meta.warnings)
    assert meta.versions["torch"] == "2.9.0"
    assert meta.knobs["NCCL_ALGO"] == "Ring"
    assert "RANK" not in meta.knobs
    assert meta.knobs["ddp.bucket_cap_bytes"] == "1024"
    assert meta.recorded_at == "2023-11-14T22:13:20+00:00"
    assert meta.peak_rss_bytes == 101


def test_a_step_without_the_profiler_is_the_median_of_those_that_nothing_slowed(tmp_path):
    write_window(tmp_path)
    assert import_trace([tmp_path]).meta.unprofiled_us == 120


def test_it_is_unknown_where_too_few_steps_ran_without_the_profiler(tmp_path):
    write_window(tmp_path, step_us=[100] * 7)
    assert import_trace([tmp_path]).meta.unprofiled_us is None


def test_the_last_window_of_all_ranks_is_read_or_the_one_that_is_named(tmp_path):
    for window in (0, 1):
        write_window(tmp_path, window, versions={"torch": f"window {window}"})
    assert import_trace([tmp_path]).meta.versions["torch"] == "window 1"
    assert import_trace([tmp_path / "window0"]).meta.versions["torch"] == "window 0"


def test_a_window_that_lacks_a_rank_is_passed_over_for_one_before_it(tmp_path):
    write_window(tmp_path, 0)
    write_rank(tmp_path, 0, 1)
    trace = import_trace([tmp_path])
    assert trace.meta.ranks == 2
    assert "rank 1 are missing or not whole, so that window0 was read" in trace.meta.warnings[0]


@pytest.mark.parametrize("damage", ["cut", "gone", "no description", "half a description"])
def test_what_is_whole_of_the_only_window_is_read(damage, tmp_path):
    write_window(tmp_path)
    profile, job = (tmp_path / "window0" / f"rank00001.{name}" for name in ("json.gz", "job.json"))
    if damage == "cut":
        profile.write_bytes(profile.read_bytes()[:100])
    elif damage == "half a description":
        job.write_text(job.read_text()[:200])
    else:
        (profile if damage == "gone" else job).unlink()
    trace = import_trace([tmp_path])
    check_trace(trace)
    assert trace.meta.numbers == (0,)
    assert any("the job has 2 ranks, but only rank 0 was imported" in warning for warning in trace.meta.warnings)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": 2}, "of version 2"),
        ({"rank": 7}, "describes rank 7"),
        ({"rank": -1}, "damaged"),
        ({"world_size": 10**15}, "damaged"),
        ({"profile_bytes": 3}, "of 3 bytes; copy it again"),
    ],
)
def test_a_folder_without_a_whole_rank_is_refused_in_one_line(changed, why, tmp_path):
    write_rank(tmp_path, 0, **changed)
    with pytest.raises(InputError) as raised:
        import_trace([tmp_path])
    (line,) = str(raised.value).splitlines()
    assert "no rank wrote a whole profile" in line
    assert why in line
