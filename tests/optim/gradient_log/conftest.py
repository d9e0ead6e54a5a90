"""Pairs of a training in place and a durable one."""

import warnings

import pytest

from tests.support.logged_pair import Pair


@pytest.fixture
def pairs(drive):
    made = []

    def make(*arguments, **more):
        made.append(Pair(drive, *arguments, **more))
        return made[-1]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tiles of 65536 elements were changed")
        yield make
        for pair in made:
            pair.close()
