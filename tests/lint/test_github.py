"""What GitHub reads: forms, workflows, updates; also CITATION.cff. They cannot run here.

Each is held against the schema of its kind. zizmor reads the workflows for what is dangerous:
rights that are not needed, actions that are not pinned, texts of strangers in commands.
"""

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import d2lpar

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = [path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
PINNED = dict(re.findall(r"^(\w+) \?= (\w+==\S+)$", MAKEFILE, re.MULTILINE))


def check(schema, *files):
    """Return what is wrong with files, a text, and nothing where they are right."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, *files], capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.parametrize(("schema", "files"), [
    ("github-workflows", WORKFLOWS),
    ("github-issue-forms", FORMS),
    ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
    ("dependabot", [GITHUB / "dependabot.yml"]),
    ("citation-file-format", [ROOT / "CITATION.cff"]),
])  # fmt: skip
def test_files_have_the_form_of_their_kind(schema, files):
    assert files and check(schema, *files) == ""


def zizmor(folder):
    """Return what zizmor finds in the files of a folder, a list of names of its audits."""
    command = [Path(sysconfig.get_path("scripts"), "zizmor"), "--offline", "--format=json", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    return [finding["ident"] for finding in json.loads(done.stdout)]


def test_workflows_are_safe():
    assert zizmor(ROOT) == []


def test_a_workflow_that_is_not_safe_is_found(tmp_path):
    path = tmp_path / ".github" / "workflows" / "wrong.yml"
    path.parent.mkdir(parents=True)
    text = re.sub("@[0-9a-f]{40}", "@main", WORKFLOWS[0].read_text())
    path.write_text(text.replace("persist-credentials: false", "fetch-depth: 1"))
    assert {"unpinned-uses", "artipacked"} <= set(zizmor(tmp_path))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_have_few_rights_little_time_and_known_commands(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {} and "group" in workflow["concurrency"]
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE)) | {"book"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 90 and job["permissions"], name
        assert set(re.findall(r"\bmake ([a-z]+)", str(job["steps"]))) <= targets
        for key in re.findall(r"matrix\.(\w+)", str(job)):
            rows = job["strategy"]["matrix"]
            assert key in rows or all(key in row for row in rows["include"]), key


def test_both_ends_of_what_is_supported_are_tested():
    tests = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())
    rows = tests["jobs"]["linux"]["strategy"]["matrix"]["include"]
    listed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c]
    assert sorted({row["python"] for row in rows}) == sorted(listed)
    (allowed,) = (r.removeprefix("torch") for r in PROJECT["dependencies"] if r[:6] == "torch>")
    assert {row["torch"] for row in rows} == {"2.11.0", "2.13.0", "2.15.0"}
    beyond = ["2.10.0", *(row["torch"] for row in rows), "2.16.0"]
    assert beyond[1:-1] == [*SpecifierSet(allowed).filter(beyond)]
    assert [PINNED["TORCH"], PINNED["TORCHVISION"]] in [
        [f"torch=={row['torch']}", f"torchvision=={row['torchvision']}"] for row in rows
    ]


@pytest.mark.parametrize("place", [
    ".github/workflows/tests.yml", "docs/installing.md", "docs/ci.md", "environment.yml"
])  # fmt: skip
def test_pins_are_those_of_the_makefile(place):
    text = (ROOT / place).read_text()
    pins = set(re.findall(r"\b(?:torch|torchvision|d2l)==[0-9][0-9.]*", text))
    assert pins and pins <= set(PINNED.values())


def test_the_workflow_on_the_page_about_ci_is_one(tmp_path):
    page = (ROOT / "docs" / "ci.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "ci.yml").write_text(text)
    assert check("github-workflows", tmp_path / "ci.yml") == ""
    assert "vgpu run --gpus 2 pytest" in text


def test_version_and_changelog_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == d2lpar.__version__
    assert citation["license"] == PROJECT["license"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)", changes, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    dates = [re.fullmatch(r".*\b(\d{4}-\d\d-\d\d)", heading)[1] for heading in headings[1:]]
    assert dates and dates == sorted(dates, reverse=True)
    parts = set(re.findall(r"^### (.*)", changes, re.MULTILINE))
    assert parts <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
