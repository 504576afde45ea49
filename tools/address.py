"""Write the address of the repository into README.md and CITATION.cff, or remove it.

make address REPOSITORY=owner/name     add the clone line, links that open chapters in Colab, Kaggle
                                       and Studio Lab, and what their first cell must install
make address REPOSITORY=               remove the address

It is stored as `repository-code` in CITATION.cff, where the book reads it. `make check` refuses any
other address: whoever registers one could serve our readers any code.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVICES = {
    "Colab": "https://colab.research.google.com/github/",
    "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/",
    "Studio Lab": "https://studiolab.sagemaker.aws/import/github/",
}
CLONE = "    git clone https://github.com/{0} && cd {1}\n\nThen:\n"
OPEN_IN = """\
Or open a chapter elsewhere. Colab and Kaggle open a single notebook; run this in its first cell:

    %pip install -q git+https://github.com/{0}

In Studio Lab, clone the whole repository and build the environment of `environment.yml`.

"""

_STORED = re.compile(r"^repository-code: https://github\.com/(\S+)\n", re.MULTILINE)
_VALID = re.compile(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*/(?!\.+$)(?!.*\.git$)[A-Za-z0-9._-]+")


def repository(root=ROOT):
    """Return the repository on GitHub, "owner/name", or "" if it is not set."""
    found = _STORED.search((root / "CITATION.cff").read_text("utf-8"))
    return found[1] if found else ""


def set_repository(value, root=ROOT):
    """Set the address of the repository in README.md and CITATION.cff, or remove it if it is ""."""
    if value and not _VALID.fullmatch(value):
        raise ValueError(
            f"the repository must have the form owner/name, as on GitHub: got {value!r}; "
            "use make address REPOSITORY=owner/name"
        )
    stored = f"repository-code: https://github.com/{value}\n" if value else ""
    citation, readme = root / "CITATION.cff", root / "README.md"
    text = _STORED.sub("", citation.read_text("utf-8"))
    citation.write_text(text.replace("keywords:\n", f"{stored}keywords:\n"), "utf-8")
    clone, open_in = "In a clone of this repository:\n", ""
    if value:
        clone, open_in = CLONE.format(value, value.split("/")[1]), OPEN_IN.format(value)
        chapters = sorted(path.name for path in (root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
        for service in SERVICES:
            links = ", ".join(f"[{name[:2]}]({link(service, value, name)})" for name in chapters)
            open_in += f"- {service}: {links}\n"
    text = readme.read_text("utf-8")
    for name, lines in (("clone", clone), ("open in", open_in)):
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        text = before + mark + lines + rest[rest.index("<!-- end -->") :]
    readme.write_text(text, "utf-8")


def link(service, value, chapter):
    """Return the URL that opens a chapter of a repository in a service."""
    return f"{SERVICES[service]}{value}/blob/main/notebooks/{chapter}"


if __name__ == "__main__":
    try:
        set_repository(sys.argv[1])
    except ValueError as error:
        sys.exit(str(error))
    print(f"the address is {sys.argv[1] or 'not set'}: see `git diff`, then commit")
