# make run        execute every lesson and the pages that go deeper, two at a time, write what came
#                 out under build/; CHAPTERS="03" for a lesson and its pages, "03_threads" for one
#                 notebook, undisturbed; PART=core for the lessons alone
# make test       the lessons, with nbval, and the tests that are not slow: six minutes
#                 ALL=1 for everything: pages that go deeper, and slow tests, too;
#                 TESTS=tests/d2lpar for a minute of them, without notebooks;
#                 TESTS="tests/vgpu/test_streams.py" for some files, with what is slow in them;
#                 OPTIONS="-x" for pytest;
#                 FRAMEWORKS=1 for everything, with Accelerate, Lightning and others, which it
#                 installs for tests/vgpu/test_frameworks.py
# make book       the book: HTML pages of the committed chapters, build/book/html/index.html
# make slides     a deck of slides of each lesson under build/slides; CHAPTERS="03"
# make lab        JupyterLab on a working copy under work/, at a page that says what is next: chapters
#                 without outputs, exercises without solutions; what you change is never overwritten
# make notebooks  execute lessons and pages in place, on an idle machine, until they show what
#                 notebooks/headlines.toml declares; CHAPTERS="03 04_answers" for some of them
# make exercises  execute the exercises in place, with their solutions
# make drawings   put the drawings of notebooks/drawings into lessons and pages
# make lessons    words, lines, predictions, figures and minutes of each lesson, words and minutes of
#                 each page; CHAPTERS="03", and WRITE=1 to put the minutes into the first cells
# make check      ruff (lint and format), hygiene and headline lines of the notebooks, and what must
#                 agree: names that Windows or macOS lacks, what GitHub reads, versions
# make browser    a browser walks through the first hour of a newcomer, and a teacher's grading
# make bench      the benchmarks
# make machines   chapters, exercises and quick tests as on other machines: other instruction sets and
#                 seeds, one core, 8 GB, no network and more, some hours;
#                 CONDITIONS="avx2 c-locale+no-home" for some of them, the last two at once,
#                 PARTS="chapters" and CHAPTERS="03 09" for less
# make assignments
#                 what make lab opens, under build/assignments, to hand out
# make grade SUBMITTED=folder
#                 grade the notebooks folder/STUDENT/NN_topic.ipynb (Linux; it executes them in a
#                 sandbox): a table, build/grades/grades.csv, pages of feedback
# make address REPOSITORY=owner/name
#                 write the address of this repository on GitHub where readers need it
#
# The first call of any target sets up .venv; later calls find it ready. Another Python or
# another torch: make PYTHON=python3.12 TORCH=torch==2.15.0 TORCHVISION=torchvision==0.29.2
# CPU=1 takes PyTorch's own builds of both without CUDA.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
D2L ?= d2l==1.0.3
INDEX := $(if $(CPU),--index-url https://download.pytorch.org/whl/cpu)
EXTRAS := lab,book,slides,test,ray,teach,d2l-unpinned
CHAPTERS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
LOG := $(VENV)/setup.log
PIP := $(BIN)/python -m pip install --disable-pip-version-check
LESSONS := $(sort $(wildcard notebooks/*.ipynb))
NOTEBOOKS := $(LESSONS) $(sort $(wildcard notebooks/deeper/*.ipynb))
EXERCISES := $(sort $(wildcard notebooks/exercises/*.ipynb))
BENCHMARKS := $(sort $(wildcard benchmarks/bench_*.py))

# Three processes: two begin with the chapters, the third with the files of tests (see
# tests/conftest.py); what waits in one leaves its core to the others. With the frameworks two: among
# three, Ray Train's test took more than its 300 s.
# Where only notebooks are named that file is not read: `loadfile` keeps the cells of each together.
# After the death of a process xdist would run its test again and again, or wait for ever.
PYTEST := -n $(if $(FRAMEWORKS),2,3) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
ALL ?= $(FRAMEWORKS)
# A file that is named is run whole.
PYTEST += $(if $(ALL)$(findstring .py,$(TESTS)),,-m "not slow")
FOLDERS := tests/d2lpar tests/vgpu tests/tools

# $(call logged,command): its output goes to the log, and to the terminal when it fails.
logged = $(1) >> $(LOG) 2>&1 || \
	{ tail -n 25 $(LOG); echo "Set-up failed. The whole log is in $(LOG)."; exit 1; }

.PHONY: run test book slides lab notebooks exercises drawings lessons check browser bench machines \
	assignments grade address
.DELETE_ON_ERROR:

run: $(READY)
	@$(BIN)/python tools/notebooks/run.py $(if $(PART),--$(PART)) $(CHAPTERS)

test: $(READY) $(if $(FRAMEWORKS),$(VENV)/frameworks/ready)
	@$(BIN)/python -m pytest $(PYTEST) $(OPTIONS) \
	    $(or $(TESTS),--nbval $(if $(ALL),$(NOTEBOOKS),$(LESSONS)) $(FOLDERS))

book: $(READY)
	@$(BIN)/python tools/book/book.py

lab: $(READY)
	@$(BIN)/python tools/lab.py

notebooks: $(READY)
	@$(BIN)/python tools/notebooks/run.py --in-place $(CHAPTERS)

exercises: $(READY)
	@$(BIN)/python tools/notebooks/run.py --in-place --folder notebooks/exercises $(CHAPTERS)

slides: $(READY)
	@$(BIN)/python tools/book/slides.py $(CHAPTERS)

drawings: $(READY)
	@$(BIN)/python tools/notebooks/drawings.py

lessons: $(READY)
	@$(BIN)/python tools/notebooks/lessons.py $(if $(WRITE),--write) $(CHAPTERS)

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python tools/notebooks/hygiene.py $(NOTEBOOKS) $(EXERCISES)
	@$(BIN)/python tools/notebooks/drawings.py --check
	@$(BIN)/python -m pytest -q tests/lint

browser: $(READY)
	@$(BIN)/python -m pytest tests/browser

bench: $(READY)
	@status=0; for file in $(BENCHMARKS); do \
	    echo "== $$file"; $(BIN)/python $$file || status=1; \
	done; exit $$status

machines: $(READY)
	@$(BIN)/python tools/machines/matrix.py $(CONDITIONS) $(if $(PARTS),--parts $(PARTS)) \
	    $(if $(CHAPTERS),--names $(CHAPTERS))

assignments: $(READY)
	@$(BIN)/python tools/grading/assignments.py $(CHAPTERS)

grade: $(READY)
	@test -n "$(SUBMITTED)" || { echo "Say where the submissions are: make grade SUBMITTED=folder"; exit 1; }
	@$(BIN)/python tools/grading/grade.py "$(SUBMITTED)" $(CHAPTERS)

address:
	@$(PYTHON) tools/address.py "$${REPOSITORY?say which: make address REPOSITORY=owner/name}"

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	    2> /dev/null || { \
	    echo "vgpu runs on Python 3.11, 3.12 and 3.13; newer ones have not been tried."; \
	    echo "$(PYTHON) is: $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12"; \
	    exit 1; }
	@mkdir -p $(VENV) && : > $(LOG)
	@echo "Setting up $(VENV), once, with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || { $(call logged,$(PYTHON) -m venv $(VENV)); }
	@echo "  1/3 $(TORCH) (the largest part)"
	@$(call logged,$(PIP) $(TORCH) $(INDEX))
	@echo "  2/3 d2lpar with $(EXTRAS)"
	@$(call logged,$(PIP) -e '.[$(EXTRAS)]')
	@echo "  3/3 $(D2L) and $(TORCHVISION), without their own pins"
	@$(call logged,$(PIP) --no-deps $(D2L))
	@$(call logged,$(PIP) --no-deps $(TORCHVISION) $(INDEX))
	@touch $(READY)

# An environment of their own, because frameworks import torchvision where it is installed, and the
# one of $(VENV) need not fit its torch.
$(VENV)/frameworks/ready: $(READY)
	@echo "  frameworks, in an environment of their own"
	@$(call logged,$(PYTHON) -m venv $(@D))
	@$(call logged,$(@D)/bin/python -m pip install --disable-pip-version-check $(TORCH) $(INDEX))
	@$(call logged,$(@D)/bin/python -m pip install --disable-pip-version-check -e '.[frameworks]')
	@touch $@
