"""Few cases out of many: every pair of values of two columns is in one of them."""

import random
from itertools import combinations


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
