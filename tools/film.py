"""Record chapter 05 in JupyterLab, training on one GPU and on two, as a GIF for the README.

python tools/film.py notebooks/figures/chapter.gif      requires Chromium and chromedriver
"""

import io
import sys
import tempfile
import time
from pathlib import Path

import browser
from PIL import Image

CHAPTER = "05_multi_gpu_from_scratch.ipynb"
SHOWN = ("train(num_gpus=1", "train(num_gpus=2")  # the recorded cells; those above run before
SIZE = (900, 520)  # pixels
READING = 1.8  # seconds for which an output is shown


def film(tab):
    """Run the two trainings of the chapter; return pairs (image, seconds).

    The last image, with both curves, is repeated as the first, which a still page shows.
    """
    frames = []

    def take_screenshot(seconds):
        image = Image.open(io.BytesIO(tab.driver.get_screenshot_as_png())).convert("RGB")
        image = image.resize(SIZE, Image.Resampling.LANCZOS)
        if frames and frames[-1][0].tobytes() == image.tobytes():
            frames[-1] = (image, frames[-1][1] + seconds)
        else:
            frames.append((image, seconds))

    tab.select(tab.number_of(SHOWN[0]))
    tab.command("notebook:run-all-above")
    tab.until(lambda: tab.status() == "busy", "the first cell runs")
    tab.finished(300)
    for text in SHOWN:
        number = tab.number_of(text)
        tab.select(number)
        time.sleep(0.4)  # waits for the scrolling
        take_screenshot(0.7)
        tab.run(number)
        tab.until(lambda: tab.status() == "busy", "the training begins")
        while tab.status() == "busy":
            tab.select(number)
            take_screenshot(0.4)
        tab.finished()
        tab.select(number)
        time.sleep(0.4)
        take_screenshot(READING)
    return [frames[-1], *frames]


def write(frames, path):
    """Write frames as an endless GIF with one palette."""
    palette = frames[-1][0].quantize(96)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image, _ in frames]
    durations = [round(1000 * seconds) for _, seconds in frames]
    durations[-1] += 2000
    first, *rest = images
    first.save(path, save_all=True, append_images=rest, duration=durations, loop=0, optimize=True)


def main(path):
    """Record the chapter in a working copy."""
    found, reason = browser.find_browser()
    if not found:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        with browser.jupyter_lab(Path(folder), VGPU_DEVICES="vgpu:2") as address:
            tab = browser.Lab(*found, width=SIZE[0] * 4 // 3, height=SIZE[1] * 4 // 3)
            try:
                tab.open(address, CHAPTER)
                tab.command("application:toggle-left-area")
                write(film(tab), path)
            finally:
                tab.close()


if __name__ == "__main__":
    main(sys.argv[1])
