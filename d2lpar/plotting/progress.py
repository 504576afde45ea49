"""A progress bar of plain text."""

import sys


def progress(items, description, delay=0):
    """Loop over a list with a progress bar: yield its items; without tqdm there is no bar.

    The last state of the bar has no times, so two runs of a notebook store the same text.

    Args:
        items: a list, or another iterable with a length.
        description: the text before the bar.
        delay: seconds after which the bar appears; a shorter loop shows no bar.
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
