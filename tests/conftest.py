"""Options that hold for all tests: what an example may take, and how many tests run at a time."""

import os

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

_MOST_PROCESSES = 8  # each imports everything anew, and has its own share of module fixtures


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What ``-n auto`` means: all cores for the whole suite; one process for named files and for real jobs, which use all."""
    if _are_real_jobs(config) or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and config.cache is not None:
        # Numba names a compiled variant by counting those in its index: two processes that save at once can take each other's.
        os.environ["NUMBA_CACHE_DIR"] = str(config.cache.mkdir(f"numba-{worker}"))


def pytest_report_header(config: pytest.Config) -> str | None:
    if _are_real_jobs(config):
        return None
    return "integration tests (real jobs in a framework's environment) are left out; run them with: pytest -m integration"


def _are_real_jobs(config: pytest.Config) -> bool:
    return "integration" in (config.option.markexpr or "").replace("not integration", "")
