"""The selection of cases covers what it says."""

import itertools

from pairwise import pairwise, product

FACTORS = {"mode": "abcde", "k": range(1, 9), "loop": ("device", "host"), "rounds": (1, 3, 16)}


def pairs(cases):
    return {
        frozenset([(x, case[x]), (y, case[y])])
        for case in cases
        for x, y in itertools.combinations(FACTORS, 2)
    }


def test_every_pair_occurs_in_few_cases():
    cases = pairwise(FACTORS)
    assert pairs(cases) == pairs(product(FACTORS))
    assert len(cases) <= 48  # 40 is the least: every mode with every k
    assert cases == pairwise(FACTORS)


def test_forbidden_cases_are_left_out():
    allowed = lambda case: case["k"] > 4 or case["mode"] != "a"  # noqa: E731
    cases = pairwise(FACTORS, allowed)
    assert all(map(allowed, cases))
    assert pairs(cases) == pairs(filter(allowed, product(FACTORS)))
