"""Union, overlap and lanes of the spans of a timeline."""


def union(spans, gap=0.0):
    """Merge spans, or other objects with `start` and `end`, into disjoint intervals.

    Those at most `gap` seconds apart are merged. Returns a list of pairs (start, end), in order.
    """
    merged = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1] + gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def overlap(a, b):
    """Return the seconds during which at least one span of `a` and one of `b` are active."""
    first, second = union(a), union(b)
    seconds, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        seconds += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return seconds


def lanes(spans):
    """Assign spans to as few lanes as possible; return pairs (lane from 0, span), by start."""
    ends, dealt = [], []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        lane = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        if lane == len(ends):
            ends.append(span.end)
        ends[lane] = span.end
        dealt.append((lane, span))
    return dealt
