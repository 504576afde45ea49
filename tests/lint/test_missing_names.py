"""Windows and macOS lack some names of Linux: mypy, told to be there, finds where they are used.

It sees the standard library only, because torch's types would bring more noise than light. Of its
complaints those count that are about names which a module lacks. A name behind an `if` that asks
`hasattr(os, "fork")` or `sys.platform == "linux"` is no fault.
"""

import re
from pathlib import Path

import nbformat
import pytest
from contents import FOLDER, find_chapters
from mypy import api

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = [*range(1, 7), 9, 10, 14, 15]  # 07, 11 and 13 kill processes, 08 and 12 start them
WORKFLOW = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
TESTS = [ROOT / name for name in re.findall(r"tests/\w+/test_\w+\.py", WORKFLOW)]  # of laptops
ON_LINUX_ONLY = {f"{name}.py" for name in ("grade", "sandbox", "session", "matrix", "parities")}
POSIX = """
import fcntl, os, resource, signal, sys
def use():
    os.fork(), os.getuid(), signal.SIGKILL, fcntl.flock(0, 2), resource.getrusage(0)
    from os import setsid
    if hasattr(os, "killpg"):
        os.killpg(1, 2)
    if sys.platform != "win32":
        os.getpgid(1)
    if sys.platform == "linux":
        os.sched_getaffinity(0)
"""

OPTIONS = """
    --config-file= --cache-dir=/dev/null --no-site-packages --ignore-missing-imports
    --check-untyped-defs --follow-imports=silent
""".split()


def missing(platform, *paths):
    """Return what of the standard library the files use and `platform` lacks: a list of texts."""
    said, errors, _ = api.run([f"--platform={platform}", *OPTIONS, *map(str, paths)])
    assert not errors and re.search("checked [0-9]+ source files?|no issues", said), said + errors
    return re.findall(r"^(.*Module.* has no attribute .*?) +\[", said, re.MULTILINE)


def test_the_check_finds_what_windows_lacks(tmp_path):
    (tmp_path / "posix.py").write_text(POSIX)
    found = missing("win32", tmp_path / "posix.py")
    names = [re.search('attribute "(.*?)"', line)[1] for line in found]
    assert names == ["fork", "getuid", "SIGKILL", "flock", "getrusage", "setsid"]
    assert missing("linux", tmp_path / "posix.py") == []


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_the_package_and_chapters_use_nothing_that_is_missing(platform, tmp_path):
    for number in CHAPTERS:
        for path in find_chapters(FOLDER, [f"{number:02}"], pages=True):
            cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
            code = [re.sub("^[%!]", "# ", cell.source, flags=re.MULTILINE) for cell in cells]
            assert '"fork"' not in "\n".join(code), f"{path.name}: Windows cannot fork"
            (tmp_path / f"chapter_{path.stem}.py").write_text("\n".join(code), encoding="utf-8")
    assert TESTS
    tools = [path for path in (ROOT / "tools").rglob("*.py") if path.name not in ON_LINUX_ONLY]
    assert missing(platform, ROOT / "d2lpar", tmp_path, *sorted(tools), *TESTS) == []
