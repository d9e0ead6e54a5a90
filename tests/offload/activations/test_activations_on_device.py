"""Saved tensors of a model on a device: the same bits, memory that does not grow, and every mistake is found."""

import itertools
import json

import pytest

from tests.support.activations import KEEPS, ROWS, WIDTH, KiB
from tests.support.late_device.mutations import OF_ACTIVATIONS
from tests.support.training import run_child

CODE = (
    "import runpy, sys; sys.argv[0] = ''; "
    "runpy.run_module('tests.support.late_device.activations', run_name='__main__')"
)
SIZE = ROWS * WIDTH * 4
PAGES = 28 * KiB  # that one saved tensor takes
NVME, HOST = {"device": "nvme"}, {"device": "cpu"}
TINY = {**NVME, "keep": "all", "host_budget": 4 * KiB}
DROPPED = {**NVME, "keep": "all", "dropped": True}
ALL_IN_MEMORY = {**HOST, "keep": "all", "host_budget": 40 * SIZE}
DEPTHS = [[{**place, "depth": depth} for depth in (5, 9)] for place in (NVME | {"keep": "boundaries"}, ALL_IN_MEMORY)]
SOME = [
    *(TINY, DROPPED, *DEPTHS[0], *DEPTHS[1]),
    {**HOST, "keep": "boundaries", "kind": "in place", "autocast": True},
    {**NVME, "keep": "attention", "kind": "attention", "depth": 4, "host_budget": 32 * KiB, "retained": True},
]
MODELS = ("plain", "in place", "checkpointed", "attention")
ALL = [
    {**place, "keep": keep, "kind": kind}
    for place, keep, kind in itertools.product((NVME | {"autocast": True}, HOST | {"retained": True}), KEEPS, MODELS)
]


def trained(cases, mutation=""):
    return json.loads(run_child(CODE, json.dumps(cases), mutation, timeout=500))


@pytest.fixture(scope="module")
def results(once):
    """Run some cases in one process; return what each gives."""
    return once("activations_on_device", lambda _: dict(zip(map(json.dumps, SOME), trained(SOME), strict=True)))


def assert_right(case, expected, found):
    assert found["digest"] == expected["digest"]
    assert found["saved_bytes"] > 0
    assert (found["read_bytes"] > 0) == (case["device"] == "nvme")
    assert found["num_kept"] == found["held_bytes"] == 0
    assert found["growth"] == 4, "the loss"


@pytest.mark.parametrize("case", SOME, ids=str)
def test_gradients_have_the_bits_of_the_cpu(results, case):
    assert_right(case, *results[json.dumps(case)])
    assert results[json.dumps(case)][1]["waits"] == 0, "nobody who trains waits for the device"


@pytest.mark.slow
def test_gradients_have_the_bits_of_the_cpu_whatever_is_kept_where():
    for case, (expected, found) in zip(ALL, trained(ALL), strict=True):
        assert_right(case, expected, found)


def test_each_is_copied_once_and_the_last_ones_have_not_left_yet(results):
    _, found = results[json.dumps(DEPTHS[1][0])]
    assert found["copies in backward"] == found["num_saved"] / 2 - 2


@pytest.mark.parametrize("cases", DEPTHS)
def test_memory_of_the_device_does_not_grow_with_the_depth(results, cases):
    """Also what the allocator cannot give to anybody yet counts. Host memory is within the budget."""
    few, many = (results[json.dumps(case)][1] for case in cases)
    assert few["peak"] == many["peak"]
    budget = cases[0].get("host_budget", 128 * KiB)
    assert 0 < many["pinned"] <= (budget // SIZE + 1) * PAGES, "and the tensor that is just saved"


@pytest.mark.slow
@pytest.mark.parametrize("mutation", OF_ACTIVATIONS)
def test_a_mistake_with_saved_tensors_on_their_way_is_found(mutation):
    def check():
        for expected, found in trained([{**NVME, "keep": "all"}, TINY, DROPPED], mutation):
            assert found["digest"] == expected["digest"]

    with pytest.raises(AssertionError):
        check()
