"""What holds for all tests: what an example may take, how many tests run at a time, and the recording that a module names."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from dpro_search.collect.trace import Trace

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="module")
def trace(request: pytest.FixtureRequest) -> Trace:
    """The trace of the recording that the test module names as ``RECORDING``."""
    from tests.recordings import trace_of

    return trace_of(request.module.RECORDING)


@pytest.fixture
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of that recording, which may be changed."""
    from tests.recordings import raw_copy

    return raw_copy(request.module.RECORDING, tmp_path)


_MOST_PROCESSES = 8  # each imports everything anew, and has its own share of module fixtures


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What ``-n auto`` means: all cores for the whole suite; one process for named files and for real jobs, which use all."""
    if _are_real_jobs(config) or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)


def pytest_configure(config: pytest.Config) -> None:
    if not _are_real_jobs(config):
        # Commands that tests start are of the checkout, as what tests import: what numba compiled for one is there for the other.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(config.rootpath), *filter(None, [os.environ.get("PYTHONPATH")])])
        _keep_bytecode(config)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and not _are_real_jobs(config):
        os.environ["OMP_NUM_THREADS"] = "1"  # numpy's threads would wait for each other on the cores of other test processes
    if (worker is not None or _are_real_jobs(config)) and config.pluginmanager.has_plugin("cacheprovider"):
        os.environ["NUMBA_CACHE_DIR"] = str(config.cache.mkdir("numba"))
        from tests import numba_cache

        if not _are_real_jobs(config):
            os.environ.update(numba_cache.LOCATOR)


def _keep_bytecode(config: pytest.Config) -> None:
    """Bytecode goes to pytest's cache if the environment forbids it beside the sources.

    Without it every process of the tests compiles the package anew, and every worker rewrites the assertions of all tests.
    """
    if sys.dont_write_bytecode and config.pluginmanager.has_plugin("cacheprovider"):
        folder = str(config.cache.mkdir("bytecode"))
        sys.dont_write_bytecode, sys.pycache_prefix = False, folder
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = folder  # of the workers, and of commands that tests start


def pytest_collection_finish() -> None:
    """Garbage is collected rarely: each full collection passes over the million objects that all tests have in common.

    They are not frozen: `gc.get_freeze_count`, which a search begins with, would count them one by one.
    """
    gc.set_threshold(20_000, 20, 20)


def pytest_report_header(config: pytest.Config) -> str | None:
    if _are_real_jobs(config):
        return None
    return "integration tests (real jobs in a framework's environment) are left out; run them with: pytest -m integration"


def _are_real_jobs(config: pytest.Config) -> bool:
    return "integration" in (config.option.markexpr or "").replace("not integration", "")
