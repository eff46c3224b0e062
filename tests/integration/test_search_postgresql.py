"""Searches share a study in a real PostgreSQL server: whoever is killed, whatever is cut, no trial is lost or counts twice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpro_search.search import SearchResult
from dpro_search.search.run_folder import Journal
from dpro_search.search.shared_study import SharedStudy

psycopg: Any = pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'dpro-search[postgresql]'")

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "search" / "killed_search.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{SCRIPT.parent}"}
TRIALS = 160


def _server_program(name: str) -> str:
    program = shutil.which(name) or max(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), default=None)
    if program is None:
        pytest.skip(f"PostgreSQL's {name} is not installed: apt-get install postgresql")
    return program


@pytest.fixture
def server() -> Iterator[Path]:
    """A server of its own, on a socket in the folder that this yields. It refuses to run as root."""
    initdb, pg_ctl = _server_program("initdb"), _server_program("pg_ctl")
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="dpro-search-pg-"))
    if user is not None:
        shutil.chown(folder, user)

    def run(*command: str) -> None:
        subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL, timeout=60)

    try:
        run(initdb, "-D", str(folder / "data"), "-U", "postgres", "--auth=trust", "--no-sync")
        options = f"-k {folder} -c listen_addresses= -c fsync=off"
        run(pg_ctl, "-D", str(folder / "data"), "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield folder
        finally:
            run(pg_ctl, "-D", str(folder / "data"), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def rows(server: Path) -> dict[int, tuple[str, str]]:
    """State and plan of the study's rows, by number."""
    with psycopg.connect(host=str(server), user="postgres", dbname="postgres") as connection:
        selected = connection.execute(
            "select number, state, value_json::json ->> 'plan'"
            " from trials join trial_user_attributes using (trial_id) where key = 'trial'"
        )
        return {number: (state, plan) for number, state, plan in selected}


def cut_all_connections(server: Path) -> int:
    with psycopg.connect(host=str(server), user="postgres", dbname="postgres") as connection:
        cut = connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = 'postgres' and pid <> pg_backend_pid() and backend_type = 'client backend'"
        )
        return len(cut.fetchall())


def start(url: str, run: Path, trials: int, *, workers: int = 1, sampler: str = "mcmc") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(run), str(trials), str(workers), url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | {"SAMPLER": sampler},
    )


def wait_for_trials(search: subprocess.Popen[str], count: int) -> None:
    assert search.stdout is not None
    for _ in range(count):
        assert search.stdout.readline(), search.communicate()[1]


def test_four_searches_share_a_study_through_a_kill_and_cut_connections(server: Path, tmp_path: Path) -> None:
    url = f"postgresql://postgres@/postgres?host={server}"
    kinds = [("mcmc", 1), ("mcmc", 2), ("optuna", 1), ("auto", 1)]
    searches = [start(url, tmp_path / str(i), TRIALS, workers=w, sampler=s) for i, (s, w) in enumerate(kinds)]
    wait_for_trials(searches[0], 30)
    searches[0].send_signal(signal.SIGKILL)
    searches[0].communicate(timeout=60)
    finished_before = rows(server)
    assert len(finished_before) >= 30
    assert cut_all_connections(server) >= 3
    wait_for_trials(searches[1], 60)
    assert cut_all_connections(server) >= 1
    for search in searches[1:]:
        assert search.wait(timeout=100) == 0, search.communicate()[1]

    rows_after = rows(server)
    assert {number: plan for number, (_, plan) in finished_before.items()}.items() <= {
        n: p for n, (_, p) in rows_after.items()
    }.items()
    counted = [plan for state, plan in rows_after.values() if state == "COMPLETE"]
    assert len(counted) == len(set(counted)) >= TRIALS
    assert {state for state, _ in rows_after.values()} <= {"COMPLETE", "FAIL"}, (
        "a killed search's rows get their state from the others"
    )
    books = [(tmp_path / str(i) / "trials.jsonl").read_bytes() for i in (1, 2, 3)]
    assert books[0] == books[1] == books[2]
    assert books[0].count(b"\n") == TRIALS

    again = start(url, tmp_path / "0", TRIALS)
    assert again.wait(timeout=60) == 0, again.communicate()[1]
    assert (tmp_path / "0" / "trials.jsonl").read_bytes() == books[0], "the killed search, run again, has what the others have"
    assert rows(server) == rows_after, "and priced nothing"
    more = start(url, tmp_path / "0", TRIALS + 20)
    assert more.wait(timeout=60) == 0, more.communicate()[1]
    assert SearchResult.load(tmp_path / "0").trials == TRIALS + 20


def pg_ctl(server: Path, *words: str) -> None:
    user = "postgres" if os.geteuid() == 0 else None
    command = [_server_program("pg_ctl"), "-D", str(server / "data"), *words]
    for _ in range(20):  # processes of a server that was killed leave its memory a little later
        if not subprocess.run(command, check=False, user=user, cwd=server, stdout=subprocess.DEVNULL, timeout=60).returncode:
            return
        time.sleep(1.0)
    pytest.fail("the server does not start")


def test_searches_outlive_a_server_that_is_killed_and_started_again(server: Path, tmp_path: Path) -> None:
    url = f"postgresql://postgres@/postgres?host={server}"
    searches = [start(url, tmp_path / str(i), TRIALS) for i in range(2)]
    wait_for_trials(searches[0], 30)
    before = rows(server)
    os.kill(int((server / "data" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
    time.sleep(1.0)
    pg_ctl(server, "-o", f"-k {server} -c listen_addresses= -c fsync=off", "-l", str(server / "log"), "-w", "start")
    for search in searches:
        assert search.wait(timeout=100) == 0, search.communicate()[1]
    after = rows(server)
    assert {n: plan for n, (_, plan) in before.items()}.items() <= {n: plan for n, (_, plan) in after.items()}.items()
    books = [(tmp_path / str(i) / "trials.jsonl").read_bytes() for i in range(2)]
    assert books[0] == books[1]
    assert books[0].count(b"\n") == TRIALS


def test_a_storage_that_stays_away_is_one_line(server: Path, tmp_path: Path) -> None:
    gone = start(f"postgresql://postgres@/no_such_database?host={server}", tmp_path / "run", 5)
    _, said = gone.communicate(timeout=60)
    assert gone.returncode == 1
    assert said.count("\n") == 1
    assert 'database "no_such_database" does not exist' in said


def test_plans_and_prices_are_readable_data(server: Path, tmp_path: Path) -> None:
    url = f"postgresql://postgres@/postgres?host={server}"
    search = start(url, tmp_path / "run", 5)
    assert search.wait(timeout=60) == 0, search.communicate()[1]
    with psycopg.connect(host=str(server), user="postgres", dbname="postgres") as connection:
        (name,) = connection.execute("select study_name from studies").fetchone()
    with SharedStudy(url, name, "a reader") as study:
        news = study.news()
    with Journal(tmp_path / "run" / "trials.jsonl") as copy:
        assert [trial for trial, _ in news] == list(copy.trials)
    assert news[0].trial.prediction == SearchResult.load(tmp_path / "run").baseline
    assert not any(news_of_island for _, news_of_island in news)
