"""The address of the repository: written and taken out in one step, and no other one anywhere.

An address that is not the project's would hand its readers the code of whoever registers it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import address
import pytest

ROOT = Path(__file__).resolve().parents[2]
HUB, PIP = "https://github.com", "pip install"  # in pieces below, so that this file passes
FILES = ("README.md", "CITATION.cff", "Makefile", "tools/address.py")
NAME = r"[\w.-]+/[\w.-]*\w"
# Where code of ours could be fetched from: a repository called d2lpar, whatever is opened in a
# service or installed from a repository, and the name d2lpar of a package index.
REPOSITORIES = re.compile(
    rf"(?:git(?:hub|lab)(?:usercontent)?\.com[/:](?=[\w.-]+/d2lpar\b)"
    rf"|git\+https://[\w.]+/|/github/(?={NAME}/blob)|src=https://github\.com/)({NAME})"
)
PACKAGES = re.compile(
    r"pypi\.org/(?:p|project)/d2lpar|pypi[-]publish|twine[ ]upload"
    r"|pip install(?: -\S+)* [^\n&|;]*?(?<![\w./@-])d2lpar(?![\w/.]| @)"
)


def strangers(text, repository):
    """Return the addresses in a text from which a reader would not fetch our code."""
    found = [found.removesuffix(".git") for found in REPOSITORIES.findall(text)]
    return [name for name in found if name != repository] + PACKAGES.findall(text)


@pytest.fixture
def copy(tmp_path):
    """Copy what `make address` reads, without an address; return the folder."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        (tmp_path / "notebooks" / path.name).touch()
    make(tmp_path, "REPOSITORY=")
    return tmp_path


def make(folder, *arguments):
    """Call `make address`; return its status and what it printed."""
    command = ["make", "-s", "address", f"PYTHON={sys.executable}", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def contents(folder):
    """Return what stands in the files, a dict."""
    return {name: (folder / name).read_text() for name in FILES}


def test_the_address_is_written_moved_and_taken_out(copy):
    before = contents(copy)
    assert make(copy, "REPOSITORY=ada/par.course")[0] == 0
    written = contents(copy)
    assert make(copy, "REPOSITORY=ada/par.course")[0] == 0 and contents(copy) == written
    assert address.repository(copy) == "ada/par.course"
    readme = written["README.md"]
    assert "    git clone https://github.com/ada/par.course && cd par.course\n" in readme
    assert f"    %pip install -q git+{HUB}/ada/par.course\n" in readme
    for start in address.SERVICES.values():
        for chapter in (copy / "notebooks").iterdir():
            assert f"]({start}ada/par.course/blob/main/notebooks/{chapter.name})" in readme
    assert strangers(readme, "ada/par.course") == []
    assert set(strangers(readme, "bob/course")) == {"ada/par.course"}
    assert make(copy, "REPOSITORY=bob/d2lpar")[0] == 0
    assert strangers(contents(copy)["README.md"], "bob/d2lpar") == []
    assert "ada" not in "".join(contents(copy).values())
    assert make(copy, "REPOSITORY=")[0] == 0 and contents(copy) == before
    assert "git clone" not in before["README.md"] and address.repository(copy) == ""


@pytest.mark.parametrize("value", [
    "ada", "ada/", "/course", "ada/b/c", "https://github.com/ada/course", "ada/course.git",
    "-ada/course", "ada/..", "ada/a course", "ada/x\n/y", "ada/$(id)",
])  # fmt: skip
def test_a_value_of_another_form_is_refused(copy, value):
    before = contents(copy)
    with pytest.raises(ValueError, match="must have the form owner/name, as on GitHub: got"):
        address.set_repository(value, copy)
    assert contents(copy) == before


def test_make_says_what_is_wrong(copy):
    status, said = make(copy, "REPOSITORY=ada")
    assert status and "must have the form owner/name, as on GitHub: got 'ada'" in said
    status, said = make(copy)
    assert status and "say which: make address REPOSITORY=owner/name" in said


def test_the_files_hold_what_make_address_writes(copy):
    value = address.repository()
    address.set_repository(value, copy)
    assert contents(copy) == contents(ROOT)


@pytest.mark.parametrize("text", [
    f"git clone {HUB}/x/d2lpar", f"git clone {HUB}/x/d2lpar.git", "git@github.com:" + "x/d2lpar",
    f"[it]({HUB}/x/d2lpar/issues)", "https://raw.githubusercontent.com/" + "x/d2lpar/main/a.py",
    f"%pip install git+{HUB}/x/anything", f"kernels/welcome?src={HUB}/x/anything/blob/main/a",
    "colab.research.google.com/github/" + "x/anything/blob/main/a.ipynb",
    "https://pypi.org/p/" + "d2lpar", f"{PIP} d2lpar", f"{PIP} -q 'd2lpar[lab]'",
    f"{PIP} torch d2lpar==0.1", "uses: pypa/gh-action-pypi" + "-publish@0",
])  # fmt: skip
def test_an_address_of_a_stranger_is_found(text):
    assert strangers(text, "") and strangers(text, "ada/d2lpar")


@pytest.mark.parametrize("text", [
    f"{HUB}/pytorch/examples", "pip install -e .", "pip install ./third_party/d2lpar",
    "d2lpar/_d2l.py", f"git clone {HUB}/ada/d2lpar && cd d2lpar", f"{PIP} torch; vgpu doctor",
    f"pip install git+{HUB}/ada/d2lpar",
])  # fmt: skip
def test_the_own_address_and_addresses_of_others_pass(text):
    assert strangers(text, "ada/d2lpar") == []


def test_no_file_has_the_address_of_a_stranger():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert len(paths) > 200
    found = {
        path.relative_to(ROOT).as_posix(): strangers(
            path.read_bytes().decode("utf-8", "ignore"), address.repository()
        )
        for path in paths
    }
    assert {name: names for name, names in found.items() if names} == {}
