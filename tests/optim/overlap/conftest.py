"""Guesses that are made at once."""

import pytest

from tests.support.tiers import be_eager


@pytest.fixture
def eager(monkeypatch):
    """One step is enough to guess the next one, whatever went wrong before."""
    be_eager(monkeypatch)
