"""Control JupyterLab in a browser, for tests of students' and teachers' workflows."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

START = Path(__file__).resolve().parents[2] / "tools" / "lab.py"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = """
    --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --hide-scrollbars
""".split()
# What the scripts of `Lab.ask` use: the page or notebook in front, its cells, and the cell with the
# number that is their first argument.
NAMES = """
const panel = window.jupyterapp?.shell.currentWidget;
const cells = panel?.content?.widgets ?? [];
const cell = cells[arguments[0]];
"""


def find_browser():
    """Return ((Chromium, chromedriver), ""), a pair of paths, or (None, reason)."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser and driver:
        return (browser, driver), ""
    missing = "no Chromium" if not browser else "no chromedriver"
    return None, f"{missing} on the PATH (Debian: apt-get install chromium chromium-driver)"


@contextlib.contextmanager
def jupyter_lab(folder, **environment):
    """Start JupyterLab as `make lab` does, with its working copy in a folder; yield its URL.

    JupyterLab's settings are in the folder, too, so the user's own have no effect.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    settings = {name: str(folder / f".{name.lower()}") for name in names}
    command = [sys.executable, START, "--work", folder, "--no-browser", "--expose-app-in-browser"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="]
    log = (folder / ".lab.log").open("w")
    server = subprocess.Popen(
        command, env=os.environ | settings | environment, stdout=log, stderr=log
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/api", timeout=5)
                break
            assert server.poll() is None, (folder / ".lab.log").read_text()[-2000:]
            time.sleep(0.25)
        yield address
    finally:
        server.terminate()
        server.wait(30)
        log.close()


class Lab:
    """A browser tab with JupyterLab; methods refer to the page or notebook in front.

    Cells are numbered from 0, including text cells.
    """

    def __init__(self, browser, driver, width=1280):
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for argument in (*OPTIONS, f"--window-size={width},900"):
            options.add_argument(argument)
        self.driver = webdriver.Chrome(options, Service(driver))
        self.driver.set_script_timeout(600)

    def close(self):
        self.driver.quit()

    def open(self, address, path):
        """Open a notebook, and wait until its kernel is ready."""
        self.driver.get(f"{address}/lab/tree/{path}?reset")
        self.until(lambda: self.status() == "idle", "the kernel is there", 180)

    def start(self, address):
        """Open the start page, as the address that JupyterLab prints does."""
        self.driver.get(address)
        self.until(lambda: self.path() == "start.md" and self.page(), "the start page is there")

    def path(self):
        return self.ask("return panel?.context?.path")

    def page(self):
        return self.ask("return panel.node.innerText").strip()

    def follow(self, text):
        """Click the first link with a text, and wait for the notebook that it opens."""
        script = (
            "return [...panel.node.querySelectorAll('a')]"
            ".filter(a => a.innerText.trim() == arguments[0])[0]"
        )
        before = self.path()
        self.until(lambda: self.ask(script, text), f"a link {text!r}")
        self.ask(script, text).click()
        self.until(lambda: self.path() != before, "another page is in front")
        self.until(lambda: self.status() == "idle", "the kernel is there", 120)

    def save(self):
        self.command("docmanager:save")
        self.until(lambda: not self.ask("return panel.context.model.dirty"), "it is saved")

    def ask(self, script, *arguments):
        return self.driver.execute_script(NAMES + script, *arguments)

    def until(self, condition, what, seconds=60):
        """Wait until a condition holds; raise AssertionError with `what` after `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(StaleElementReferenceException):
                if condition():
                    return
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {seconds} s")

    def status(self):
        """Return the state of the kernel: "idle", "busy", "starting", "dead", ..."""
        return self.ask("return panel?.sessionContext?.session?.kernel?.status ?? 'none'")

    def command(self, name, **arguments):
        """Execute a command of JupyterLab, as its menus do, without waiting for its end."""
        self.ask("window.jupyterapp.commands.execute(arguments[0], arguments[1])", name, arguments)

    def run_all(self, seconds=300):
        self.command("notebook:run-all-cells")
        self.until(lambda: self.status() == "busy", "the first cell runs")
        self.finished(seconds)

    def finished(self, seconds=60):
        """Wait until no cell is running or queued."""
        waiting = "cell.model.type == 'code' && cell.model.executionState != 'idle'"
        self.until(
            lambda: self.status() == "idle" and not self.numbers(waiting), "the cells end", seconds
        )

    def numbers(self, condition, *arguments):
        """Return the numbers of the cells for which a condition in JavaScript holds."""
        script = f"cells.map((cell, i) => {condition} ? i : -1).filter(i => i >= 0)"
        return self.ask(f"return {script}", *arguments)

    def number_of(self, text):
        [number] = self.numbers("cell.model.sharedModel.getSource().includes(arguments[0])", text)
        return number

    def errors(self):
        return self.numbers(
            "cell.model.type == 'code' && cell.model.outputs.toJSON().some("
            "output => output.output_type == 'error')"
        )

    def source(self, number):
        return self.ask("return cell.model.sharedModel.getSource()", number)

    def write(self, number, source):
        """Replace the source of a cell, as a user does: click, select all, paste."""
        field = self.click(number)
        field.send_keys(Keys.CONTROL, "a")
        # Paste instead of typing: CodeMirror would indent and close brackets.
        self.ask(
            "const data = new DataTransfer(); data.setData('text/plain', arguments[1]);"
            "arguments[0].dispatchEvent(new ClipboardEvent('paste', {clipboardData: data,"
            " bubbles: true, cancelable: true}))",
            field,
            source,
        )
        self.until(lambda: self.source(number).strip() == source.strip(), "the cell has the text")

    def select(self, number):
        self.ask(
            "panel.content.activeCellIndex = arguments[0];"
            "cell.node.scrollIntoView({block: 'center'})",
            number,
        )
        drawn = (
            "return cell.node.isConnected && (cell.model.type != 'code'"
            " || cell.inputHidden || !!cell.node.querySelector('.cm-content'))"
        )
        self.until(lambda: self.ask(drawn, number), "the cell is drawn")

    def click(self, number):
        """Activate a cell, and click into its source; return that element of the page."""
        self.select(number)
        field = self.ask("return cell.node.querySelector('.cm-content')", number)
        field.click()
        return field

    def run(self, number):
        """Run a cell with Shift+Enter, without waiting for its end."""
        self.select(number)
        if self.ask("return cell.inputHidden", number):
            self.command("notebook:run-cell-and-select-next")
        else:
            self.click(number).send_keys(Keys.SHIFT, Keys.ENTER)

    def stop(self):
        button = "jp-button[data-command='notebook:interrupt-kernel'], " \
            "[data-jp-item-name='interrupt'] jp-button"  # fmt: skip
        self.driver.find_element(By.CSS_SELECTOR, button).click()

    def output(self, number):
        self.select(number)
        shown = "return cell.outputArea.node.innerText"
        if self.ask("return cell.model.outputs.length > 0", number):
            self.until(lambda: self.ask(shown, number).strip(), "the output is drawn")
        return self.ask(shown, number)
