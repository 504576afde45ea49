"""Reference solutions for exercise notebook 14."""

from d2lpar.exercises.marks import reference
from d2lpar.timelines.timeline import Timeline


def _points_to(X):  # side of the head, the fullest column, from the middle of the arrow
    columns = (X.amax(0) > 0).sum(0)
    lit = columns.nonzero()
    return "right" if 2 * columns.argmax() > lit.min() + lit.max() else "left"


_LABELS = {
    "arrows": _points_to,
    "fruit": lambda X: "ripe" if X[0].sum() > X[1].sum() else "green",
    "spots": lambda X: int((X.amax(0) > 0).sum()),
}


@reference
def labels_broken(task, images, changes):
    """Return for each change a label that it alters, such as "right becomes left", or ""."""
    label, broken = _LABELS[task], {}
    for name, change in changes.items():
        seen = [(label(X), label(change(X))) for X in images]
        lost = [f"{before} becomes {after}" for before, after in seen if before != after]
        broken[name] = lost[0] if lost else ""
    return broken


@reference
def bytes_from_host(tensors, devices):
    """Return the bytes that the host sends to split tensors over the devices."""
    with Timeline() as timeline:
        for x in tensors:
            for part, device in zip(x.chunk(len(devices)), devices, strict=True):
                part.to(device)
    return sum(n for (source, _), n in timeline.bytes_by_link().items() if source.type == "cpu")
