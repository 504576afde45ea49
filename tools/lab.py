"""Open JupyterLab on a working copy of chapters and exercises, at a start page.

python tools/lab.py                  create or update the copy, work/, and start JupyterLab in it
python tools/lab.py --copy-only      the copy only, for a running JupyterLab or an editor
python tools/lab.py --no-browser     this and other options are passed to JupyterLab

The committed chapters have outputs, and the exercises solutions; the copy has neither. A file that
the reader has changed is never overwritten: its new edition is written beside it, and only its
imports of moved names are updated (`moved.py`). A deleted file is restored, so a reader can start a
chapter again.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

sys.path.extend(str(Path(__file__).parent / name) for name in ("notebooks", "grading"))

try:
    from assignments import hand_out
    from contents import FOLDER, pages_of, read_chapter, replace_file
    from jinja2 import Environment
    from jupyterlab.labapp import LabApp
    from moved import follow
except ModuleNotFoundError as error:
    sys.exit(f"{sys.executable} lacks {error.name}; docs/installing.md says what to install.")

ROOT = FOLDER.parent
SETTINGS = Path(__file__).with_name("lab_settings")
START = "start.md"
TEMPLATE = Path(__file__).with_name("start.md.j2")
RECORD = ".handed_out.json"
CURE = """Nothing in it is lost. Make room there, or name another folder:
python tools/lab.py --work FOLDER"""
NOT_NEEDED = [  # of nbgrader
    f"--ServerApp.jpserver_extensions=nbgrader.server_extensions.{name}=False"
    for name in ("assignment_list", "course_list", "formgrader", "validate_assignment")
]

_ROW = re.compile(r"^\| \[(\d\d) (.+?)\]\(notebooks/(\S+)\) \| (.+?) \|", re.MULTILINE)
_NUMBER = re.compile(r"(?<![^/])\d\d(?=_)")
_HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_POINTS = re.compile(r"^(\d+) of \d+ points", re.MULTILINE)


def update(folder, files):
    """Update a working copy to the current edition, except for files that its reader has changed.

    `files`: a dict from paths in the copy to bytes, as returned by `hand_out`. Returns the paths of
    written files, and a dict from changed files to their new editions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record, written, beside = _renumber(folder, read_record(folder), files), [], {}
    try:
        for name, data in files.items():
            edition, handed = record.get(name, ("", set()))
            if edition == _hash(data) and (folder / name).exists():
                continue
            handed.add(content_of(data))
            for target in _edition_names(name):
                if _is_unchanged(folder / target, handed):
                    break
                _update_imports(folder / target)
            replace_file(folder / target, data)
            written.append(target)
            record[name] = _hash(data), handed
            if target != name:
                beside[name] = target
                continue
            first_new = folder / next(islice(_edition_names(name), 1, None))
            if _is_unchanged(first_new, handed):
                first_new.unlink(missing_ok=True)
    finally:
        entries = {name: [edition, sorted(handed)] for name, (edition, handed) in record.items()}
        replace_file(folder / RECORD, json.dumps(entries, indent=1).encode())
    return written, beside


def read_record(folder):
    """Return the record of a working copy: by path, hashes of the last edition and of all contents.

    Without a record, every file that differs from the current edition counts as changed.
    """
    try:
        entries = json.loads((folder / RECORD).read_text("utf-8"))
        return {name: (edition, set(handed)) for name, (edition, handed) in entries.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _renumber(folder, record, files):
    """Rename what was handed out under another number, with new editions beside it."""
    numbered = {_NUMBER.sub("", name): name for name in files}
    renamed = {
        name: name if name in files else numbered.get(_NUMBER.sub("", name), name)
        for name in record
    }
    for name, new in renamed.items():
        old, home = folder / name, folder / new
        for path in sorted(old.parent.glob(f"{old.stem}*{old.suffix}")) if new != name else ():
            target = home.with_name(home.stem + path.name.removeprefix(old.stem))
            if not target.exists():
                path.rename(target)
    return {renamed[name]: entry for name, entry in record.items()}


def content_of(data):
    """Return a hash of a file; of a notebook, of its cells and outputs only.

    JupyterLab rewrites the rest of a notebook whenever it saves.
    """
    try:
        cells = json.loads(data)["cells"]
        parts = [[c["cell_type"], "".join(c["source"]), c.get("outputs", [])] for c in cells]
        data = json.dumps(parts).encode()
    except (ValueError, KeyError, TypeError):  # no notebook
        pass
    return _hash(data)


def _hash(data):
    return hashlib.sha256(data).hexdigest()


def _edition_names(name):
    """Yield possible names of an edition: `03_topic.ipynb`, `03_topic.new.ipynb`, `.new2`, ..."""
    stem, _, suffix = name.rpartition(".")
    yield name
    yield f"{stem}.new.{suffix}"
    yield from (f"{stem}.new{number}.{suffix}" for number in count(2))


def _is_unchanged(path, handed):
    """Return whether a file is missing or not changed by its reader, so that it may be written."""
    return not path.exists() or content_of(path.read_bytes()) in handed


def _update_imports(path):
    """Update the imports of moved names in a notebook that its reader has changed."""
    data, changed = path.read_bytes(), path.stat().st_mtime_ns
    with contextlib.suppress(ValueError, KeyError, TypeError):  # no notebook
        if (new := follow(data)) != data:
            replace_file(path, new)
            os.utime(path, ns=(changed, changed))  # the reader stopped where he changed it himself


@dataclass
class Progress:
    """The reader's progress in one notebook of a working copy; of a chapter, in its core."""

    name: str
    changed: float = 0.0  # modification time if the reader has changed or run anything, else 0
    cells: int = 0  # code cells
    run: int = 0  # code cells that have run
    stopped: str = ""  # id of the first cell that has not run
    section: str = ""  # heading above that cell
    points: int = 0
    reached: int = 0  # points that the checks printed last

    @property
    def done(self):
        """Whether all points are reached or, without points, all cells have run."""
        return self.reached == self.points if self.points else self.run == self.cells


def progress(folder, name, handed):
    """Return the `Progress` in a notebook of a working copy; an unreadable one is not started.

    `handed`: the content hashes of the editions handed out under this name.
    """
    path, found, heading = folder / name, Progress(name), ""
    try:
        cells = read_chapter(path, core=True).cells
    except (OSError, ValueError, KeyError, AttributeError):
        return found
    for cell in cells:
        if cell.cell_type == "markdown":
            heading = [heading, *_HEADING.findall(cell.source)][-1]
        elif cell.cell_type == "code" and cell.source:
            found.cells += 1
            if cell.execution_count is not None:
                found.run += 1
            elif not found.stopped:
                found.stopped, found.section = cell.get("id", ""), heading
            found.points += cell.metadata.get("nbgrader", {}).get("points", 0)
            printed = "".join(output.get("text", "") for output in cell.outputs)
            found.reached += sum(map(int, _POINTS.findall(printed)[-1:]))
    if found.run or content_of(path.read_bytes()) not in handed:
        found.changed = path.stat().st_mtime
    return found


def start_page(folder, root=ROOT):
    """Return the start page of a working copy, as Markdown: what to do next, and a table.

    The README in `root` has the table of chapters.
    """
    record, chapters = read_record(folder), []
    for number, title, name, question in _ROW.findall((root / "README.md").read_text("utf-8")):
        lesson, exercises = (
            progress(folder, path, record.get(path, ("", ()))[1])
            for path in (name, f"exercises/{name}")
        )
        pages = [(path.relative_to(folder).as_posix(), path) for path in pages_of(folder / name)]
        pages = [(name, _title(path)) for name, path in pages if name in record]
        chapters.append((number, title, question, lesson, exercises, pages))
    beside = [
        (name, new.relative_to(folder).as_posix())
        for name in record
        for new in sorted((folder / name).parent.glob(f"{Path(name).stem}.new*"))
    ]
    template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text())
    begun = [(f"chapter {row[0]}, {row[1]}", *row[3:5]) for row in chapters]
    return template.render(next=_next(begun), beside=beside, chapters=chapters, start=START)


def _title(path):
    """Return the title of a notebook, or its name if there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, IndexError, TypeError):
        return _TITLE.search(read_chapter(path).cells[0].source)[1]
    return path.stem


def _next(chapters):
    """Return a link to the next task, given a list of (title, chapter, exercises)."""
    begun = [(max(c.changed, e.changed), place) for place, (_, c, e) in enumerate(chapters)]
    changed, place = max(begun, key=lambda pair: pair[0])
    title, chapter, exercises = chapters[place]
    if not changed:
        return f"[{chapters[0][0]}]({chapters[0][1].name})."
    if chapter.changed > exercises.changed and not chapter.done:
        where = f", where you stopped, in *{chapter.section}*" if chapter.section else ""
        return f"[{title}]({chapter.name}#cell-id={chapter.stopped}){where}."
    if not exercises.done:
        return f"[the exercises of {title}]({exercises.name})."
    if place + 1 < len(chapters):
        title, chapter, _ = chapters[place + 1]
        return f"[{title}]({chapter.name})."
    return "you have reached the end. What is left is in the table."


def start(folder, arguments):
    """Run JupyterLab, with further arguments, at the start page of a working copy, then exit."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # hides a debugger warning
    options = [
        "--ServerApp.log_level=ERROR",
        "--ExtensionApp.log_level=ERROR",
        "--KernelManager.transport_encryption=auto",  # hides a warning about encryption
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/lab/tree/{START}",
        f"--LabApp.app_settings_dir={SETTINGS}",
        f"--LabApp.workspaces_dir={folder / '.workspaces'}",
        *NOT_NEEDED,
    ]
    if hasattr(os, "getuid") and os.getuid() == 0:
        options.append("--allow-root")
    LabApp.launch_instance([*options, *arguments])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a normal exit would wait forever for the thread of an unfinished request


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=ROOT / "work", help="where the copy is")
    parser.add_argument("--copy-only", action="store_true", help="start nothing")
    options, others = parser.parse_known_args(arguments)
    if options.copy_only and others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    folder = options.work.resolve()
    try:
        written, beside = update(folder, hand_out())
        replace_file(folder / START, start_page(folder).encode())
    except ValueError as error:  # a fault in the committed notebooks
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"The working copy could not be written: {error}.\n{CURE}", file=sys.stderr)
        return 1
    new = f"{len(written) or 'no'} new files"
    print(f"Working copy: {folder}, {new}. What you changed is as it was.", flush=True)
    for name, new in beside.items():
        print(f"  {name} is as you left it; its new edition is {new}")
    if not options.copy_only:
        start(folder, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
