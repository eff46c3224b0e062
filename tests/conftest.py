"""Options that hold for all tests."""

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_report_header(config: pytest.Config) -> str | None:
    if "integration" in (config.option.markexpr or "").replace("not integration", ""):
        return None
    return "integration tests (real jobs in a framework's environment) are left out; run them with: pytest -m integration"
