"""Shared fixtures."""

import sys

import pytest


@pytest.fixture
def without(monkeypatch):
    """Hide a package as if it were not installed."""

    def hide(package: str) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        for backend in ("envpool", "ale"):
            monkeypatch.delitem(sys.modules, f"sb3_ano.envs.{backend}_backend", raising=False)

    return hide
