"""Who gets how much of each link: weighted max-min fairness with caps, arrays in, rates out.

All transfers' rates grow together, each in proportion to its weight, until something stops them: a link on
the route is full, or the transfer's own cap is reached. What is stopped keeps its rate, the others grow on.
The result is the one allocation in which nobody can get more without taking it from somebody who has less
(per weight): D. Bertsekas and R. Gallager, Data Networks, 2nd ed., section 6.5.2.

The growing level need not be followed link by link: a link that is the tightest one on the route of *every*
transfer crossing it can be settled at once, whatever happens elsewhere, since the level of the other links
only rises as transfers are settled. So every round settles all such links together.

Links are filled in four places, by two methods. By rounds on arrays here, which needs no compiler. Compiled code fills
the tightest link first instead, by a heap (`compiled_fairness.py`; 150 transfers in 10 us, here in 3 ms). Few changes
among many transfers are settled near the change alone: by the same heap on dictionaries, as long as they reach no more
transfers than arrays are worth (`shares.py`), and on records that never leave compiled code (`compiled_rates.py`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["FloatArray", "IntArray", "max_min_rates"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Levels closer than this (relative) are one level: what differs by rounding only is settled in one round.
_SAME = 1.0 - 1e-12


def max_min_rates(
    capacity: FloatArray,
    routes: IntArray,
    weights: FloatArray,
    caps: FloatArray,
) -> FloatArray:
    """The rates that weighted max-min fairness gives to transfers sharing links.

    Args:
        capacity: rate of each link, plus one last entry of infinity that stands for 'no link'; shape (links +
            1,).
        routes: links crossed by each transfer, filled up with `links` where a route is shorter; shape
            (transfers, longest route). A link may appear once per route.
        weights: share of each transfer relative to the others, above zero; shape (transfers,).
        caps: largest rate of each transfer, infinity for none; shape (transfers,).

    Returns:
        The rate of each transfer in the unit of `capacity`; infinity where neither a link nor a cap limits
        it.

    >>> two_links = np.array([10.0, 4.0, np.inf])
    >>> routes = np.array([[0, 2], [0, 1], [1, 2]])
    >>> max_min_rates(two_links, routes, np.ones(3), np.array([np.inf, np.inf, 1.0])).tolist()
    [7.0, 3.0, 1.0]
    """
    num_links = len(capacity) - 1
    hops = routes.shape[1]
    rates = np.zeros(len(routes))
    left = capacity.copy()
    open_ = np.arange(len(routes))  # transfers whose rate is not settled yet
    cap_level = caps / weights
    with np.errstate(divide="ignore", invalid="ignore"):
        while open_.size:
            flat = routes.ravel()
            load = np.bincount(flat, weights=np.repeat(weights, hops), minlength=num_links + 1)
            level = left / load  # where every open transfer on the link would stop; unused links never matter
            level[num_links] = np.inf
            seen = level[routes]
            lowest = np.minimum(seen.min(axis=1), cap_level)
            limited_elsewhere = lowest[:, None] < seen * _SAME
            undecided = np.zeros(num_links + 1, dtype=np.bool_)
            undecided[routes[limited_elsewhere]] = True
            settled = ~(limited_elsewhere | undecided[routes]).all(axis=1) | (cap_level <= lowest)
            now = open_[settled]
            rate = lowest[settled] * weights[settled]
            rates[now] = rate
            taken = np.bincount(
                routes[settled].ravel(), weights=np.repeat(rate, hops), minlength=num_links + 1
            )
            left = np.maximum(left - taken, 0.0)
            left[num_links] = np.inf
            going_on = ~settled
            open_, routes = open_[going_on], routes[going_on]
            weights, cap_level = weights[going_on], cap_level[going_on]
    return rates
