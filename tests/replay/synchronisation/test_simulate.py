"""Simulated jobs: times that can be computed by hand, and predictions of the time to a loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.costmodel.convergence import Convergence, FittedRun, fit_convergence
from dpro_search.errors import InputError
from dpro_search.replay import replay
from dpro_search.replay.synchronisation import EffectiveSteps, ranked, simulate, time_to_loss
from dpro_search.runtime.schemes import Pace, parse_paces, parse_scheme
from dpro_search.space.graph_builder import GraphBuilder

EASY = Convergence(drift=0.0, staleness=0.0, start_loss=2.0, levels=(1.0, 0.5), needed=(40.0, 100.0), log_error=0.1, runs=5)


def simulated(scheme, paces, limit_s=60.0, **options):
    progress = EffectiveSteps(EASY, parse_scheme(scheme), len(paces))
    return simulate(parse_scheme(scheme), paces, progress, stop=lambda now: False, limit_s=limit_s, **options)


def test_a_round_of_bsp_lasts_as_long_as_the_slowest_step_and_a_commit():
    simulation = simulated("bsp", parse_paces("1:2", step_s=1.0, commit_s=0.5), limit_s=15.1)
    rounds = [commit.time_s for commit in simulation.commits if commit.worker == 0]
    assert np.diff(rounds) == pytest.approx(1.5)
    assert simulation.waiting_s[0] == pytest.approx(0.0)
    assert simulation.waiting_s[1] / simulation.end_s == pytest.approx(1 / 3, abs=0.05)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 20))
def test_rounds_are_those_of_the_op_engine(steps_ms, local_steps, server_ms):
    """A round as a graph: steps on each worker's device, updates on the server's, and all of them before the next steps."""
    graph = GraphBuilder()
    server = graph.add_device(name="server")
    workers = [graph.add_device() for _ in steps_ms]
    sent = [graph.add_op(w, 1000.0 * local_steps * ms + 2500.0) for w, ms in zip(workers, steps_ms, strict=True)]
    applied = [graph.add_op(server, 1000.0 * server_ms, after=[op]) for op in sent]
    for worker, first in zip(workers, sent, strict=True):
        graph.carry(graph.add_op(worker, 2500.0, after=applied), first)
    paces = [Pace(step_s=ms / 1000, commit_s=0.005) for ms in steps_ms]
    simulation = simulated(f"fixed-adacomm(steps={local_steps})", paces, limit_s=6.0, server_s=server_ms / 1000)
    last = [commit.time_s for commit in simulation.commits][len(paces) - 1 :: len(paces)]
    assert np.diff(last) == pytest.approx(replay(graph.build()).iteration_us / 1e6)


def test_asynchronous_workers_keep_their_own_speed():
    simulation = simulated("asp", parse_paces("1:4", step_s=1.0))
    assert simulation.steps[1] == pytest.approx(4 * simulation.steps[0], rel=0.05)
    assert simulation.waiting_share == 0.0


def test_adsp_commits_equally_often_at_unequal_speed():
    simulation = simulated("adsp(commits=3, period_s=6)", parse_paces("1:2:4", step_s=0.5, commit_s=0.1))
    commits = [sum(1 for commit in simulation.commits if commit.worker == worker) for worker in range(3)]
    assert max(commits) - min(commits) <= 2
    assert simulation.steps[2] > 3 * simulation.steps[0]
    assert simulation.waiting_share == 0.0


def test_updates_queue_at_a_server_that_takes_one_at_a_time():
    simulation = simulated("asp", parse_paces("1:1:1:1", step_s=0.1), server_s=0.2, limit_s=20.0)
    assert np.diff([commit.time_s for commit in simulation.commits]) == pytest.approx(0.2)


def test_a_worker_that_becomes_slow_delays_a_synchronous_job_from_then_on():
    paces = [Pace(step_s=1.0), Pace(step_s=1.0, changes=((10.0, 3.0),))]
    times = [commit.time_s for commit in simulated("bsp", paces, limit_s=40.0).commits if commit.worker == 0]
    assert np.diff(times)[:8] == pytest.approx(1.0)
    assert np.diff(times)[-5:] == pytest.approx(3.0)


def test_a_worker_that_is_1000_times_slower_stops_synchronous_schemes_alone():
    paces = parse_paces("1:1:1:0.001", step_s=0.1)
    assert time_to_loss(parse_scheme("bsp"), paces, EASY, limit_s=600.0).time_s is None
    assert time_to_loss(parse_scheme("adsp(commits=2)"), paces, EASY, limit_s=600.0).time_s < 60.0


def test_the_search_prefers_not_to_wait_where_speeds_differ_and_commits_are_dear():
    best = ranked(parse_paces("1:1:2:3", step_s=0.1, commit_s=0.1), EASY)
    assert best[0].scheme.name == "adsp"
    assert best[0].interval_s[0] < best[0].time_s < best[0].interval_s[1]


def test_a_loss_that_no_scheme_reaches_is_said():
    with pytest.raises(InputError, match=r"no scheme reaches a loss of 0.5 within 1 s"):
        ranked(parse_paces("1:1", step_s=0.1), EASY, limit_s=1.0)


def test_the_fit_finds_what_local_steps_and_staleness_cost():
    truth = Convergence(drift=0.05, staleness=0.1, start_loss=2.0, levels=(1.0, 0.5), needed=(40.0, 100.0), log_error=0.0, runs=1)
    runs = []
    for scheme in ("bsp", "asp", "fixed-adacomm(steps=4)", "fixed-adacomm(steps=16)", "adsp(commits=2, period_s=2)"):
        progress, reached = EffectiveSteps(truth, parse_scheme(scheme), 3), {}

        def stop(now, progress=progress, reached=reached):
            for level, goal in enumerate(truth.needed):
                if progress.made >= goal:
                    reached.setdefault(level, now)
            return len(reached) == 2

        paces = parse_paces("1:2:3", step_s=0.1, commit_s=0.02)
        simulation = simulate(parse_scheme(scheme), paces, progress, stop=stop, check_s=0.02)
        columns = np.array([(c.time_s, c.steps, c.weight, c.behind_steps) for c in simulation.commits]).T
        times = np.array([reached[level] for level in range(2)])
        runs.append(FittedRun(commit_s=columns[0], steps=columns[1], weights=columns[2], behind_steps=columns[3], reached_s=times))
    fitted = fit_convergence(2.0, truth.levels, runs * 4)
    assert fitted.drift == pytest.approx(0.05, abs=0.02)
    assert fitted.staleness == pytest.approx(0.1, abs=0.04)
    assert fitted.needed[-1] == pytest.approx(100.0, rel=0.1)


def test_the_interval_is_as_wide_as_schemes_are_wrong_that_the_fit_leaves_out():
    def run(scheme: str, reached_s: float) -> FittedRun:
        ones, times = np.ones(200), np.arange(1.0, 201.0)
        return FittedRun(
            commit_s=times, steps=ones, weights=ones, behind_steps=0 * ones, reached_s=np.array([reached_s]), scheme=scheme
        )

    alike = fit_convergence(2.0, [0.5], [run(scheme, 100.0) for scheme in ("bsp", "asp", "adsp") for _ in range(4)])
    assert alike.scheme_log_error == pytest.approx(0.0, abs=1e-6)
    # Updates of one step that miss none: no drift and no staleness explains that one scheme needs more of them.
    unlike = fit_convergence(2.0, [0.5], [run(scheme, s) for scheme, s in (("bsp", 100.0), ("asp", 120.0)) for _ in range(4)])
    assert unlike.scheme_log_error == pytest.approx(np.log(1.2), rel=1e-3)
    assert unlike.factor_interval[1] > 1.2


def test_runs_that_never_reach_the_loss_cannot_be_fitted():
    run = FittedRun(
        commit_s=np.zeros(1), steps=np.ones(1), weights=np.ones(1), behind_steps=np.zeros(1), reached_s=np.array([np.nan])
    )
    with pytest.raises(InputError, match="train longer"):
        fit_convergence(1.0, [0.1], [run])


def test_gradient_accumulation_makes_one_step_of_a_round_however_many_batches_it_has():
    paces = parse_paces("1:1", step_s=0.1)
    one, other = (time_to_loss(parse_scheme(f"accumulation(batches={n})"), paces, EASY).time_s for n in (2, 8))
    assert other == pytest.approx(4 * one, rel=0.05)
