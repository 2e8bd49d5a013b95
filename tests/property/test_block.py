"""Block verification by exact enumeration: the law of what it emits, and how much it keeps.

The rule is the per-row reference of ``oracle.chances``, which the vectorised one is compared with number by
number in ``test_accept``; here it meets every draft and every outcome of every draw.
"""

import itertools

import numpy as np
import oracle
import pytest

V = 3


def context_laws(rng, depth: int, sharp: float):
    """A random law after every sequence of fewer than ``depth`` tokens."""
    contexts = [c for n in range(depth) for c in itertools.product(range(V), repeat=n)]
    return {c: oracle.softmax(sharp * rng.standard_normal(V)) for c in contexts}


def point(laws):
    """The same with all mass on the best token."""
    return {c: np.eye(V)[law.argmax()] for c, law in laws.items()}


def outcomes(p, q, k: int, chances):
    """(probability, drafts kept, law of the extra token, drafts) of everything that can happen in a round."""
    for drafts in itertools.product(range(V), repeat=k):
        rest = np.prod([q[drafts[:i]][drafts[i]] for i in range(k)])
        if rest == 0:
            continue
        before = [drafts[:i] for i in range(k + 1)]
        chance, weights = chances([p[c] for c in before], [q[c] for c in before[:-1]], drafts)
        for kept in range(k, -1, -1):
            here = rest * (chance[kept] if kept else 1)
            rest -= here
            if here > 0:
                yield here, kept, weights[kept] / weights[kept].sum(), drafts


def emitted_law(p, q, k: int, chances) -> np.ndarray:
    """Law of k + 1 tokens: those of the round, then the target's own."""
    law = np.zeros((V,) * (k + 1))
    for here, kept, extra, drafts in outcomes(p, q, k, chances):
        for rest in itertools.product(range(V), repeat=k + 1 - kept):
            tokens = (*drafts[:kept], *rest)
            follow = np.prod([p[tokens[:i]][tokens[i]] for i in range(kept + 1, k + 1)])
            law[tokens] += here * extra[rest[0]] * follow
    return law


def target_law(p, k: int) -> np.ndarray:
    law = np.zeros((V,) * (k + 1))
    for tokens in itertools.product(range(V), repeat=k + 1):
        law[tokens] = np.prod([p[tokens[:i]][tokens[i]] for i in range(k + 1)])
    return law


def kept(p, q, k: int, chances) -> float:
    return sum(here * n for here, n, _, _ in outcomes(p, q, k, chances))


def ratio_test(p, q, drafts):
    """The rule "reject" in the same form: draft i + 1 is only looked at when i drafts have passed."""
    passed = np.array([min(1.0, p[i][d] / q[i][d]) for i, d in enumerate(drafts)])
    reach = np.cumprod([1.0, *passed])
    exactly = np.array([*(reach[:-1] * (1 - passed)), reach[-1]])
    at_most = np.cumsum(exactly)
    chance = np.divide(exactly, at_most, out=np.zeros_like(exactly), where=at_most > 0)
    return chance, [*(np.maximum(p[i] - q[i], 0) for i in range(len(drafts))), p[len(drafts)]]


CASES = [(k, seed, sharp) for k, seeds in ((2, 25), (3, 8)) for seed in range(seeds) for sharp in (0.7, 2.0)]


def laws(k, seed, sharp):
    rng = np.random.default_rng([k, seed])
    return context_laws(rng, k + 1, sharp), context_laws(rng, k, sharp)


@pytest.mark.parametrize("kind", ["drawn", "point"])
def test_the_law_is_the_targets(kind):
    """DST.1: two and three drafts over three tokens, to rounding."""
    for k, seed, sharp in CASES:
        p, q = laws(k, seed, sharp)
        q = point(q) if kind == "point" else q
        for rule in (oracle.chances, ratio_test):
            np.testing.assert_allclose(emitted_law(p, q, k, rule), target_law(p, k), rtol=0, atol=1e-12)


def test_it_keeps_no_fewer():
    """On average at least what the ratio test keeps; just as much when the drafts are points."""
    gains = []
    for k, seed, sharp in CASES:
        p, q = laws(k, seed, sharp)
        gains.append(kept(p, q, k, oracle.chances) - kept(p, q, k, ratio_test))
        points = kept(p, point(q), k, oracle.chances) - kept(p, point(q), k, ratio_test)
        assert abs(points) < 1e-12
    assert min(gains) > -1e-12
    assert np.mean(gains) > 0.01


def test_a_point_leaves_what_the_target_does_not_give_it():
    """The surplus of a point is reach * (1 - p of its token)."""
    p, q = laws(2, 0, 1.0)
    drafts = tuple(point(q)[()].argmax() for _ in range(2))
    rows = [p[drafts[:i]] for i in range(3)]
    chance, weights = oracle.chances(rows, [np.eye(V)[d] for d in drafts], drafts)
    reach = rows[0][drafts[0]]
    assert weights[1].sum() == pytest.approx(reach * (1 - rows[1][drafts[1]]))
    assert chance[1] == pytest.approx(weights[1].sum() / (weights[1].sum() + 1 - reach))


WRONG = {
    "kept half as often": lambda chance, weights, p, q: ([*(c / 2 for c in chance[:-1]), chance[-1]], weights),
    "the ratio test's residual": lambda chance, weights, p, q: (
        chance, [*(np.maximum(a - b, 0) for a, b in zip(p, q, strict=False)), p[-1]],
    ),
    "the target's own token after a rejection": lambda chance, weights, p, q: (chance, p),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_has_another_law(wrong):
    """PEER.1."""

    def rule(p, q, drafts):
        return WRONG[wrong](*oracle.chances(p, q, drafts), p, q)

    p, q = laws(2, 1, 2.0)
    assert np.abs(emitted_law(p, q, 2, rule) - target_law(p, 2)).max() > 1e-3
