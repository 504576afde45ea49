"""One GPU and one link have the same rates in all chapters: those of the engine's tables."""

import re

import nbformat
import pytest
from contents import FOLDER, find_chapters, printed_texts

from vgpu import GPUS, PRESETS

UNITS = {"GB/s": 1e9, "TB/s": 1e12, "TFLOP/s": 1e12, "Gbit/s": 1e9 / 8}
RATE = re.compile(
    r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?:\\[, ]| )?(?:\\text\{ ?)?(" + "|".join(UNITS) + ")"
)
TABLES = [
    *(rate for gpu in GPUS.values() for rate in (gpu.bandwidth, *gpu.peaks.values())),
    *(rate for link in PRESETS.values() for rate in (link.bandwidth, link.pageable) if rate),
]
OTHERS = {
    "02_roofline": ["0.11 TFLOP/s", "13.7 TFLOP/s"],  # an addition on the roof; d2l's section 13.3
    "04_overlapping_copies": ["55 GB/s"],  # a real H100
    "04_host_memory": ["55 GB/s", "3.3 GB/s"],  # a real H100; d2l's section 13.3
    "07_answers": ["8 GB/s", "65 Gbit/s"],  # the answer
    "08_sharded_data_parallel": ["185 GB/s"],  # a cell further down
    "08_answers": ["717 TFLOP/s"],  # the lesson prints it
    "08_replicas_of_shards": ["368 GB/s"],  # eight cards of 46 GB/s
    "10_one_answer": ["1.2 TB/s"],  # a TPU of version 4
    "11_checkpoints": ["7 TB/s"],  # Meta's storage
    # of a whole step, with Llama 3; the answer takes the lesson's formulas
    "13_planning_a_training_run": [
        *("450 TFLOP/s", "430 TFLOP/s", "400 TFLOP/s"),  # of a whole step, with Llama 3
        *("92 GB/s", "368 GB/s"),  # four cards of 23, eight of 46
    ],
    "13_answers": ["209 TFLOP/s", "400 TFLOP/s", "363 TFLOP/s"],
    "13_experts": ["717 TFLOP/s"],  # chapter 08
    "13_long_sequences": ["717 TFLOP/s"],  # chapter 08
    "10_tensor_parallelism": ["14 TFLOP/s"],  # an exercise: products on a modelled V100
}
CHAPTERS = [*find_chapters(FOLDER, pages=True), *find_chapters(FOLDER / "exercises")]


def strange_rates(notebook):
    """Return rates in a notebook's texts that no table of the engine and no output has."""
    printed = " ".join(text for cell in notebook.cells for text in printed_texts(cell))
    strange = []
    for cell in notebook.cells:
        for number, unit in RATE.findall(cell.source if cell.cell_type == "markdown" else ""):
            plain = number.replace(",", "")
            value, half = float(plain), 0.5 * 10 ** -len(plain.partition(".")[2])
            if not (
                any(abs(value - rate / UNITS[unit]) <= half for rate in TABLES)
                or re.search(rf"(?<![\d.]){re.escape(plain)}(?!\d)", printed)
            ):
                strange.append(f"{number} {unit}")
    return strange


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_rates_are_those_of_the_tables_or_are_printed(chapter):
    allowed = OTHERS.get(chapter.stem, [])
    assert [rate for rate in strange_rates(nbformat.read(chapter, 4)) if rate not in allowed] == []


@pytest.mark.parametrize(("text", "strange"), [
    ("An H100 moves 3,350 GB/s, $3350\\text{ GB/s}$, or 3.35 TB/s.", []),
    ("NVLink carries 374 GB/s, a ring 360 GB/s, a card 400 Gbit/s.", []),
    ("It has 1000 TFLOP/s.", ["1000 TFLOP/s"]),
    ("A ring carries 355 GB/s over NVLink, or 185 GB/s.", ["355 GB/s"]),  # 185 is printed
])  # fmt: skip
def test_a_rate_of_no_table_is_found(text, strange):
    out = nbformat.v4.new_output("stream", text="it carries 185 GB/s")
    cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell("f()", outputs=[out])]
    assert strange_rates(nbformat.v4.new_notebook(cells=cells)) == strange
