"""What the checks of the exercises 14 compare answers with."""

from .marks import reference


@reference
def groups_of(rank, t, d, p):
    """Return the tensor, the data and the pipeline group of a rank, by looking at all ranks."""
    places = {
        r: (r % t, r // t % d, r // (t * d)) for r in range(t * d * p)
    }  # part, replica, stage
    mine = places[rank]
    return [
        [r for r, place in places.items() if _differ_at_most(place, mine, axis)]
        for axis in range(3)
    ]


def _differ_at_most(place, other, axis):
    return all(i == axis or place[i] == other[i] for i in range(3))


@reference
def attention(scores, V):
    """Return (out, largest, total) of attention with these scores, (n, keys), and values."""
    largest = scores.amax(1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(1, keepdim=True)
    return weights / total @ V, largest, total
