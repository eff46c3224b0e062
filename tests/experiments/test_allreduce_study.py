"""The campaign of the all-reduce study: cases, a journal that goes on, predictions from measured exchanges, tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpro_search.collect.launch.host_limits import burst_bytes
from experiments.allreduce import characterised
from experiments.allreduce.cases import BURSTS, RATE_BPS, WORKERS, Case, cases, sizes_of
from experiments.allreduce.characterise import Journal, measured_step, paced_step, single_key
from experiments.allreduce.predicted import MIB, busiest_share, exchange_of, predicted_us
from experiments.allreduce.schemes import SCHEMES

COMPUTE_S = 2.0
TRAINING = {"network": "resnet-50", "batch": 4}


def ring_us(workers: int, size_bytes: float) -> float:
    """Of an exchange on links of 62.5 bytes a us."""
    return 100.0 * workers + 2 * (workers - 1) / workers * size_bytes / 62.5


def server_us(workers: int, sizes: list[float]) -> float:
    """Of tensors of so many bytes on up to four servers: the busiest one's link, which had rested, and the last one's way back."""
    servers = min(workers, 4)
    share = busiest_share("mxnet-kvstore", [int(size / 4) for size in sizes], servers)
    busy_us = max(sum(sizes) * share * workers / servers - burst_bytes(RATE_BPS), 0.0) / 62.5
    return 200.0 + (1 + 1 / len(sizes)) * (50.0 * len(sizes) + busy_us)


def filled(folder: Path) -> Journal:
    """A journal of two schemes as if they took just what a formula says, and steps as predicted from it."""
    journal = Journal(folder)
    for network in ("resnet-50", "mobilenet", "nasnet-large"):
        for batch in (1, 2, 4, 8):
            journal.add(single_key(network, batch), network=network, batch=batch, seconds=[COMPUTE_S / 4 * batch] * 3)
    for scheme in ("ddp-gloo", "mxnet-kvstore"):
        for workers in WORKERS:
            case = Case(scheme=scheme, workers=workers, **TRAINING)
            step = paced_step(journal, case)
            if workers == 1:
                journal.add(case.key, compute_us=step.compute_us, steps_us=[step.compute_us])
                continue
            sizes = sizes_of(Case(scheme=scheme, workers=workers))
            bursts = [[4.0 * elements for elements in some] for some in BURSTS]
            if scheme == "ddp-gloo":
                us = [ring_us(workers, size) for size in sizes]
                bursts_us = [ring_us(workers, sum(some)) for some in bursts]
            else:
                us = [server_us(workers, [size]) for size in sizes]
                bursts_us = [server_us(workers, some) for some in bursts]
            latency = Case(scheme=scheme, workers=workers)
            journal.add(latency.key, sizes_bytes=sizes, us=us, bursts=BURSTS, bursts_us=bursts_us)
            exchange = exchange_of(journal, scheme, workers, of_others=False)
            assert exchange is not None
            taken = predicted_us(scheme, step, exchange)
            journal.add(case.key, compute_us=step.compute_us, steps_us=[taken * 0.99, taken, taken * 1.3])
    return journal


def test_one_vector_is_varied_at_a_time_and_every_case_is_run_once():
    for scheme in SCHEMES:
        listed = cases(scheme)
        assert len({case.key for case in listed}) == len(listed)
        trainings = [case for case in listed if case.network]
        assert {case.workers for case in trainings} == {1, 2, 4, 8, 16}
        for case in trainings:
            varied = (case.workers != 8) + (case.batch != 4) + (case.network != "resnet-50")
            assert varied <= 1, case


def test_a_journal_that_was_cut_off_goes_on(tmp_path):
    case = Case(scheme="ddp-gloo", workers=2, **TRAINING)
    Journal(tmp_path).add(case.key, steps_us=[1.0])
    with (tmp_path / "characterised.jsonl").open("a") as file:
        file.write('{"key": "cut o')
    again = Journal(tmp_path)
    assert list(again.rows) == [case.key]
    again.add("another", steps_us=[2.0])
    assert list(Journal(tmp_path).rows) == [case.key, "another"]


def test_a_training_keeps_the_computation_that_it_was_run_with_when_one_worker_is_recorded_again(tmp_path):
    journal = filled(tmp_path)
    case = Case(scheme="ddp-gloo", workers=2, **TRAINING)
    journal.add(single_key(**TRAINING), **TRAINING, seconds=[2 * COMPUTE_S] * 3)
    again = Journal(tmp_path)
    assert measured_step(again, case).compute_us == pytest.approx(COMPUTE_S * 1e6)
    assert paced_step(again, case).compute_us == pytest.approx(2 * COMPUTE_S * 1e6), "what it would be run with now"


def test_large_units_are_known_from_bursts_and_a_first_exchange_is_not_believed_if_it_took_longer(tmp_path):
    journal = filled(tmp_path)
    row = journal.rows[Case(scheme="ddp-gloo", workers=2).key]
    bucket = 28 * MIB  # of the burst of 8 tensors of 4 MiB, after the first of them
    row["bursts_us"][-1] = 4e6  # as long for a byte as nothing smaller
    row["us"] = [1e9 if size > 16 * MIB else us for size, us in zip(row["sizes_bytes"], row["us"], strict=True)]
    exchange = exchange_of(journal, "ddp-gloo", 2, of_others=False)
    assert exchange.unit_us(bucket) == pytest.approx(4e6 * 28 / 32)
    assert exchange.unit_us(64 * MIB) == pytest.approx(4e6 * 64 / 32)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_times_that_say_how_long_links_had_rested_are_not_a_price_of_bytes(tmp_path, factor):
    journal = filled(tmp_path)
    before = exchange_of(journal, "mxnet-kvstore", 8, of_others=False)
    row = journal.rows[Case(scheme="mxnet-kvstore", workers=8).key]
    row["us"] = [
        us * (factor if 64 << 10 < 4 * size < 4 * MIB else 1) for size, us in zip(row["sizes_bytes"], row["us"], strict=True)
    ]
    assert exchange_of(journal, "mxnet-kvstore", 8, of_others=False) == before


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_exchanges_among_other_numbers_of_workers_give_the_constants(tmp_path, workers):
    journal = filled(tmp_path)
    step = paced_step(journal, Case(scheme="mxnet-kvstore", workers=workers, **TRAINING))
    own, other = (exchange_of(journal, "mxnet-kvstore", workers, of_others=of_others) for of_others in (False, True))
    assert own.us_per_byte == pytest.approx(workers / min(workers, 4) / 62.5, rel=0.02)
    assert own.message_us == pytest.approx(50.0, rel=0.1)
    assert predicted_us("mxnet-kvstore", step, other) == pytest.approx(predicted_us("mxnet-kvstore", step, own), rel=0.02)
    ring, ring_elsewhere = (exchange_of(journal, "ddp-gloo", workers, of_others=of_others) for of_others in (False, True))
    assert ring_elsewhere.us_per_byte == pytest.approx(2 * (workers - 1) / workers / 62.5, rel=0.03)
    assert ring.unit_us(25 * 2**20) == pytest.approx(ring_us(workers, 25 * 2**20), rel=0.02)


def test_a_line_through_fewer_workers_is_not_continued_below_what_links_take(tmp_path):
    """Two ranks that exchange badly, as with a table that chooses badly for two, say nothing good of sixteen."""
    journal = filled(tmp_path)
    row = journal.rows[Case(scheme="ddp-gloo", workers=2).key]
    row["us"], row["bursts_us"] = ([us * 3 for us in row[name]] for name in ("us", "bursts_us"))
    elsewhere = exchange_of(journal, "ddp-gloo", 16, of_others=True)
    assert elsewhere.us_per_byte >= 2 * 15 / 16 / 62.5


def test_the_tables_show_images_a_second_efficiency_and_what_was_predicted(tmp_path):
    journal = filled(tmp_path)
    text = "\n".join(characterised.lines(tmp_path))
    row = journal.rows[Case(scheme="ddp-gloo", workers=8, **TRAINING).key]
    step_us = sorted(row["steps_us"])[1]
    assert f"{8 * 4 / step_us * 1e6:.2f}, {100 * row['compute_us'] / step_us:.0f} %" in text
    accuracy = next(line for line in text.splitlines() if line.startswith("| other sizes"))
    assert "| 0.0 % | 0.0 % | 0.0 % |" in accuracy
    right, pairs = accuracy.split("|")[-2].split(" of ")
    assert int(right) == int(pairs) > 0
    assert json.loads((tmp_path / "characterised.jsonl").read_text().splitlines()[0])["machine"]
