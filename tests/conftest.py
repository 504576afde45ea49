"""What all tests share."""

import pytest


@pytest.fixture(autouse=True)
def no_windows(monkeypatch):
    """Draw figures without a display, whatever the user's settings are."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
