"""(s) What `Animator` takes of an epoch of a second, with the five points an epoch of d2l's loop.

The loop runs in a kernel, as in a notebook: an epoch is a second of matrix products.
"""

import sys
from statistics import median

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from report import ratio_row

EPOCHS = 10
CODE = f"""
import time, torch, d2lpar
x = torch.rand(300, 300)
drawn = []
animator = d2lpar.Animator("epoch", legend=["train loss", "train acc", "test acc"])
for epoch in range({EPOCHS}):
    start, drawing = time.perf_counter(), 0
    for part in range(5):
        until = time.perf_counter() + 0.2
        while time.perf_counter() < until:
            x @ x
        before = time.perf_counter()
        animator.add(epoch + part / 5, (1 / (epoch + 1), 0.5, 0.5))
        drawing += time.perf_counter() - before
    drawn.append(drawing / (time.perf_counter() - start - drawing))
print(*drawn)
"""


def main():
    shares = []
    for _ in range(3):
        notebook = new_notebook(cells=[new_code_cell(CODE)])
        NotebookClient(notebook, timeout=120).execute()
        (text,) = (o.text for o in notebook.cells[0].outputs if o.output_type == "stream")
        shares.append(sum(map(float, text.split())) / EPOCHS)
    return int(not ratio_row("(s) drawing / training", median(shares), 0.05, at_least=False))


if __name__ == "__main__":
    sys.exit(main())
