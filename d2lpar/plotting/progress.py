"""A progress bar of plain text."""

import sys


def progress(items, description, delay=0):
    """Return a generator of the items of a list, under a progress bar where tqdm is installed.

    The bar goes to stderr and ends on a line without times, so that two runs of a notebook leave
    the same text.

    Args:
        items: what to loop over; it has a length.
        description: the text before the bar.
        delay: the seconds after which the bar appears. A loop that ends sooner leaves no text.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield from items
        return
    bar = "{desc}{percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt}"
    with tqdm(
        total=len(items),
        desc=f"{description}: ",
        bar_format=bar + " [{elapsed}<{remaining}]",
        delay=delay,
        mininterval=0.25,
        file=sys.stderr,
        ascii=False,
    ) as display:
        try:
            for item in items:
                yield item
                display.update()
        finally:
            display.bar_format = bar
