"""Few cases out of many: every pair of values of two columns is in one of them."""

import random
from itertools import combinations, product

import pytest


def pairwise_cases(columns, allowed=lambda case: True, seed=0):
    """Cases, as dicts, that have every allowed pair of values of two columns between them.

    `columns`: values by name. `allowed`: of a whole case. The same seed gives the same cases.
    """
    random_ = random.Random(seed)
    drawn = ({name: random_.choice(values) for name, values in columns.items()} for _ in range(4000))
    pool = [case for case in drawn if allowed(case)]
    missing = set().union(*map(_pairs, pool))
    cases = []
    while missing:
        best = max(pool[:400] + cases[-1:], key=lambda case: len(_pairs(case) & missing))
        if not _pairs(best) & missing:
            best = next(case for case in pool if _pairs(case) & missing)
        cases.append(best)
        missing -= _pairs(best)
    return cases


def _pairs(case):
    return set(combinations(case.items(), 2))


def each_value_once(*columns):
    """Return parameters for all combinations of values of some columns.

    All are slow but a few, which have every value between them.
    """
    quick = [tuple(column[row % len(column)] for column in columns) for row in range(max(map(len, columns)))]
    return slow_but(quick, *columns)


def slow_but(quick, *columns):
    """Return parameters for all combinations of values of some columns; all are slow but the quick ones."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in product(*columns)]
