"""JupyterLab in a browser, driven by Selenium: cells are run, stopped, written and read."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def find_browser():
    """Return the paths of a Chromium and of its driver, or the reason why there are none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser and driver:
        return (browser, driver), ""
    missing = "no Chromium" if not browser else "no chromedriver"
    return None, f"{missing} on the PATH (Debian: apt install chromium chromium-driver)"


@contextlib.contextmanager
def jupyter_lab(folder, **environment):
    """Start JupyterLab in a folder, with settings of its own; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {name: str(folder / f".{name}") for name in ("config", "data", "runtime", "ipython")}
    settings = {
        "JUPYTER_CONFIG_DIR": own["config"],
        "JUPYTER_DATA_DIR": own["data"],
        "JUPYTER_RUNTIME_DIR": own["runtime"],
        "IPYTHONDIR": own["ipython"],
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.token="]
    command += [f"--port={port}", "--ServerApp.port_retries=0", "--expose-app-in-browser"]
    if hasattr(os, "getuid") and os.getuid() == 0:
        command.append("--allow-root")
    log = (folder / ".lab.log").open("w")
    server = subprocess.Popen(
        command, cwd=folder, env=os.environ | settings | environment, stdout=log, stderr=log
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
    """A tab with a notebook.

    Cells are counted from 0; cells of text count, too.
    """

    def __init__(self, browser, driver, width=1280, height=900):
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for argument in (*QUIET, f"--window-size={width},{height}"):
            options.add_argument(argument)
        self.driver = webdriver.Chrome(options, Service(driver))
        self.driver.set_script_timeout(600)

    def close(self):
        """End the browser."""
        self.driver.quit()

    def open(self, address, path):
        """Open a notebook, and wait until its kernel can be used."""
        self.driver.get(f"{address}/lab/tree/{path}?reset")
        self.until(lambda: self.ask("return !!window.jupyterapp"), "JupyterLab is there")
        self.until(lambda: self.status() == "idle", "the kernel is there", 120)

    def ask(self, script, *arguments):
        """Run a line of JavaScript; return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def until(self, condition, what, seconds=60):
        """Wait until a condition holds, or fail and say what did not come."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(StaleElementReferenceException):
                if condition():
                    return
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {seconds} s")

    def status(self):
        """Return the state of the kernel: "idle", "busy", "starting", "dead", ..."""
        return self.ask(
            "const panel = window.jupyterapp.shell.currentWidget;"
            "return panel?.sessionContext?.session?.kernel?.status ?? 'none'"
        )

    def command(self, name, **arguments):
        """Give a command of JupyterLab, as its menus do, without waiting for its end."""
        self.ask("window.jupyterapp.commands.execute(arguments[0], arguments[1])", name, arguments)

    def run_all(self, seconds=300):
        """Run all cells, and wait for the end."""
        self.command("notebook:run-all-cells")
        self.until(lambda: self.status() == "busy", "the first cell runs")
        self.finished(seconds)

    def finished(self, seconds=60):
        """Wait until nothing runs and nothing waits to run."""
        waiting = (
            "return window.jupyterapp.shell.currentWidget.content.widgets.filter("
            "cell => cell.model.type == 'code' && cell.model.executionState != 'idle').length"
        )
        self.until(
            lambda: self.status() == "idle" and not self.ask(waiting), "the cells end", seconds
        )

    def source(self, number):
        """Return the source of a cell."""
        return self.ask(self._cell + "return cell.model.sharedModel.getSource()", number)

    def number_of(self, text):
        """Return the number of the one cell whose source holds a text."""
        script = (
            "return window.jupyterapp.shell.currentWidget.content.widgets.map("
            "(cell, i) => cell.model.sharedModel.getSource().includes(arguments[0]) ? i : -1"
            ").filter(i => i >= 0)"
        )
        [number] = self.ask(script, text)
        return number

    def write(self, number, source):
        """Click into a cell, select all and type another source, as a person does."""
        self.select(number)
        field = self.ask(self._cell + "return cell.node.querySelector('.cm-content')", number)
        field.click()
        field.send_keys(Keys.CONTROL, "a")
        # CodeMirror indents and closes brackets as one types; a paste does neither.
        self.ask(
            "const data = new DataTransfer(); data.setData('text/plain', arguments[1]);"
            "arguments[0].dispatchEvent(new ClipboardEvent('paste', {clipboardData: data,"
            " bubbles: true, cancelable: true}))",
            field,
            source,
        )
        self.until(lambda: self.source(number).strip() == source.strip(), "the cell has the text")

    def select(self, number):
        """Make a cell the active one, and scroll to it."""
        script = (
            "const notebook = window.jupyterapp.shell.currentWidget.content;"
            "notebook.activeCellIndex = arguments[0];"
            "notebook.widgets[arguments[0]].node.scrollIntoView({block: 'center'})"
        )
        self.ask(script, number)
        place = "return !!" + self._find + ".node.querySelector('.cm-content')"
        self.until(lambda: self.ask(place, number), "the cell is drawn")

    def run(self, number):
        """Run one cell with Shift+Enter, without waiting for its end."""
        self.select(number)
        field = self.ask(self._cell + "return cell.node.querySelector('.cm-content')", number)
        field.click()
        field.send_keys(Keys.SHIFT, Keys.ENTER)

    def stop(self):
        """Press the stop button of the toolbar."""
        button = "jp-button[data-command='notebook:interrupt-kernel'], " \
            "[data-jp-item-name='interrupt'] jp-button"  # fmt: skip
        self.driver.find_element(By.CSS_SELECTOR, button).click()

    def output(self, number):
        """Scroll to a cell, and return the text below it."""
        self.select(number)
        has_some = self._cell + "return cell.model.outputs.length > 0"
        shown = self._cell + "return cell.outputArea.node.innerText"
        if self.ask(has_some, number):
            self.until(lambda: self.ask(shown, number).strip(), "the output is drawn")
        return self.ask(shown, number)

    def errors(self):
        """Return the numbers of the cells that show an error."""
        script = (
            "return window.jupyterapp.shell.currentWidget.content.widgets.map((cell, i) =>"
            " cell.model.type == 'code' && cell.model.outputs.toJSON().some("
            "output => output.output_type == 'error') ? i : -1).filter(i => i >= 0)"
        )
        return self.ask(script)

    def picture(self, path):
        """Save what the tab shows."""
        self.driver.save_screenshot(str(path))

    _find = "window.jupyterapp.shell.currentWidget.content.widgets[arguments[0]]"
    _cell = f"const cell = {_find};"
