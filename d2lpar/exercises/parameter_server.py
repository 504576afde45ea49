"""Reference solutions for exercise notebook 11."""

import itertools

import torch

from d2lpar.exercises.marks import reference


@reference
def bytes_in(num_servers, num_keys=None, num_workers=4, K=1_000_000):
    """Return the bytes received by a server, and over links by a machine with one of each kind."""
    servers, machines = [0] * num_servers, [0] * num_workers
    for worker, server in itertools.product(range(num_workers), range(num_servers)):
        values = torch.zeros((num_keys or K) // num_servers)
        keys = torch.zeros(len(values) if num_keys else 0, dtype=torch.int32)
        pull, answer, push = keys.nbytes, values.nbytes, keys.nbytes + values.nbytes
        servers[server] += pull + push
        if worker != server:
            machines[worker] += answer
            machines[server % num_workers] += pull + push
    return servers[0], machines[0]


def _take_turns(k, lr, num_steps, curvature=1.0):
    w, pulled, history = 1.0, [1.0] * k, []
    for t in range(num_steps):
        w -= lr * curvature * pulled[t % k]
        pulled[t % k] = w
        history.append(w)
    return history


@reference
def path_of(k, lr, num_steps):
    """Return the weight after each turn of k workers."""
    return _take_turns(k, lr, num_steps)


@reference
def most(lr, curvature):
    """Return the largest number of workers for which the weight converges to 0."""
    ends = [abs(_take_turns(k, lr, 2000, curvature)[-1]) for k in range(1, 20)]
    return max((k for k, end in enumerate(ends, 1) if end < 0.5), default=0)


@reference
def recurrence(compute, s):
    """Return when each worker finishes each step, by the chapter's formula."""
    steps, k = len(compute[0]), len(compute)
    D = [[] for _ in range(k)]
    for t in range(steps):
        waits = max(D[j][t - 1 - int(s)] for j in range(k)) if s < t else 0.0
        for i in range(k):
            D[i].append(max(D[i][t - 1] if t else 0.0, waits) + compute[i][t])
    return D


@reference
def of_one_delay(lr, num_steps):
    """Return the weight if each gradient but the first is one update old."""
    history = [1.0, 1.0]  # the initial w, for the first two steps
    for _ in range(num_steps):
        history.append(history[-1] - lr * history[-2])
    return history[-1]
