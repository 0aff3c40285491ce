# Every target sets up what it needs: type `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RESULTS ?= results
REPORTS ?= reports
# All versions are those the tests were run with. With an NVIDIA driver pip chooses torch itself; a driver older than the CUDA of
# PyPI's build needs another one: make TORCH_INDEX=https://download.pytorch.org/whl/cu126 (or .../cpu, which is small).
HAS_GPU := $(shell command -v nvidia-smi)
TORCH_INDEX ?=
INDEX = $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) --extra-index-url https://pypi.org/simple)
# The experiments that a report is made of are small: on a GPU they take longer than on two cores, and one at a time.
DEVICE ?= cpu

# What one process has compiled, the others load, also where the environment says that no bytecode is to be written.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help report report-full test test-floor test-slow chaos docs check format bench doctor gpu trainer scoreboard museum clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	grep -v $(if $(HAS_GPU),'^torch==','^$$') constraints-cpu.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' -c $(VENV)/constraints.txt $(INDEX)
	touch $@

# The pages are written when the main question has its trials with a single seed, and again when the sweep is done. What is behind
# an @ narrows a sweep.
# Exit code 1 of a sweep: some trials failed. The others are reported, and the code is handed on.
define sweep_and_report
	@failed=0; for sweep in equivalence@seed=0 $(1); do name=$${sweep%%@*}; narrowed=$${sweep#$$name}; \
	$(BIN)/accumulation-harness run +experiment=$$name $${narrowed#@} \
	device=$(DEVICE) $(2) results=$(RESULTS); \
	status=$$?; case $$status in 0) ;; 1) failed=1;; *) exit $$status;; esac; \
	$(BIN)/accumulation-harness report --results $(RESULTS) --out $(REPORTS) || exit $$?; done; exit $$failed
endef

report: $(VENV)/.ready  ## measure the core questions quickly and write reports/index.html, with recorded verdicts of the others
	$(call sweep_and_report,core,hydra.sweeper.size=quick)

report-full: $(VENV)/.ready  ## measure every question with its full grid (hours; resumes)
	$(call sweep_and_report,all,)

test: $(VENV)/.ready  ## run the tests (about 5 minutes on 2 cores)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# The oldest torch that sweeps are promised for, and the Python that machines with cards have beside it, in an environment of its own.
FLOOR := .floor
FLOOR_TORCH := 2.11.0
FLOOR_PYTHON ?= $(firstword $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null) $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python) $(PYTHON))
FLOOR_TESTS := tests/test_trial.py tests/audit/test_session.py tests/watch/test_session.py tests/test_dynamo.py

$(FLOOR)/.ready: pyproject.toml
	$(FLOOR_PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/pip install --quiet --disable-pip-version-check --editable '.[sweep]' torch==$(FLOOR_TORCH) pytest pytest-xdist hypothesis $(INDEX)
	touch $@

test-floor: $(FLOOR)/.ready  ## audits, trials and watched runs with the oldest torch that sweeps are promised for
	$(FLOOR)/bin/python -m pytest -q -n 2 --dist loadfile $(FLOOR_TESTS)

test-slow: $(VENV)/.ready  ## run the long tests too
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m ""

chaos: $(VENV)/.ready  ## campaigns: faults at every call, and a sweep that is killed again and again (exit code 3: could not start)
	$(BIN)/python -m pytest -q -m "" tests/test_injected.py
	$(BIN)/python -m tests.soak --seed $(or $(SEED),0)

# Without --quiet, with which mkdocs does not count its warnings and builds in spite of them.
docs: $(VENV)/.ready  ## build the documentation into site/, without a network; a link that leads nowhere is an error
	$(BIN)/python -m docs.numbers
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: $(VENV)/.ready  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/run.py benchmarks/gpu.py benchmarks/gpu_stages.py

format: $(VENV)/.ready  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready  ## what the harness costs: a table of ratios (an idle machine)
	$(BIN)/python benchmarks/run.py

doctor: $(VENV)/.ready  ## what a report of a bug needs, and why a GPU is not seen
	$(BIN)/accumulation-harness doctor

gpu: $(VENV)/.ready  ## on a CUDA machine: what only a card can show, in MINUTES=8; results/gpu/gpu.tar.gz is what to send
	$(BIN)/python benchmarks/gpu.py --minutes $(or $(MINUTES),8)

trainer: $(VENV)/.ready  ## audit a released trainer in an environment of its own: NAME=trl (scoreboard/trainers.toml)
	$(BIN)/python scoreboard/record.py $(NAME)

scoreboard: $(VENV)/.ready  ## write docs/findings/scoreboard.md and museum.md from the records of these audits
	$(BIN)/python scoreboard/page.py
	$(BIN)/python scoreboard/museum.py

museum: $(VENV)/.ready  ## run each known bug of a release, broken and mended, in environments of their own: NAME=ID for one
	$(BIN)/python scoreboard/museum.py $(or $(NAME),all)

clean:  ## remove the environment and caches; results and reports stay
	rm -rf $(VENV) $(FLOOR) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
