"""Swappers that are closed, and checked for leaks, when a test ends."""

import contextlib

import pytest

from nvme_offload import ClosedError, TensorSwapper
from tests.support.swapper_tools import config_for


@pytest.fixture
def open_swapper(tmp_path):
    """Opens swappers whose buffers must all be free when the test ends."""
    swappers = []

    def open_one(*paths, faults=None, **options):
        swappers.append(TensorSwapper(config_for(*(paths or [tmp_path]), **options), faults=faults))
        return swappers[-1]

    yield open_one
    for swapper in swappers:
        with contextlib.suppress(ClosedError):
            swapper.synchronize()
            assert swapper.pool.num_free == swapper.pool.num_buffers
        swapper.close()


@pytest.fixture
def swapper(open_swapper):
    return open_swapper()
