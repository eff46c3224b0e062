"""Options that hold for all tests."""

import pytest


def pytest_report_header(config: pytest.Config) -> str | None:
    if "integration" in (config.option.markexpr or "").replace("not integration", ""):
        return None
    return "integration tests (real jobs in a framework's environment) are left out; run them with: pytest -m integration"
