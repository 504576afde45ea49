"""Reference solutions for exercise notebook 12."""

import itertools

from d2lpar.chapters.scaling import allreduce_seconds
from d2lpar.exercises.marks import reference


def _step_parts(offer, b, t0, t, num_bytes):
    M, g = offer["machines"], offer["gpus"]
    each = t0 + t * b / (M * g)
    total = allreduce_seconds("ring", g, num_bytes, offer["inside"])
    total += allreduce_seconds("ring", M, num_bytes, offer["between"])
    return each / 3 + max(each * 2 / 3, total), each, total


@reference
def step_parts(offer, b, *measured):
    """Return the seconds of a step, of its computation and of its allreduce."""
    return _step_parts(offer, b, *measured)


@reference
def all_plans(offers, batches, num_steps, *measured):
    """Return seconds, price, offer and batch of each feasible plan."""
    plans = []
    for (name, offer), b in itertools.product(offers.items(), batches):
        k = offer["machines"] * offer["gpus"]
        if b % k == 0 and b // k <= 512 and b <= 8192:
            seconds = num_steps(b) * _step_parts(offer, b, *measured)[0]
            plans.append((seconds, seconds / 3600 * offer["price"], name, b))
    return plans
