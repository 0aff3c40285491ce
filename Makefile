# Every target sets up what it needs: type `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RESULTS ?= results
REPORTS ?= reports
# Without a GPU the constraints pin the versions the tests were run with; with one, pip chooses the build for it.
CONSTRAINTS ?= $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)

.DEFAULT_GOAL := help
.PHONY: help report report-full test test-slow chaos docs check format bench gpu scoreboard clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' $(CONSTRAINTS)
	touch $@

# Exit code 1 of a sweep: some trials failed. The others are reported, and the code is handed on.
define sweep_and_report
	@$(BIN)/python -m harness +experiment=all $(1) results=$(RESULTS); status=$$?; \
	case $$status in 0|1) $(BIN)/python -m analysis.report --results $(RESULTS) --out $(REPORTS) || exit $$?;; esac; exit $$status
endef

report: $(VENV)/.ready  ## run the quick grids of all experiments and write reports/index.html (resumes what was stopped)
	$(call sweep_and_report,hydra.sweeper.size=quick)

report-full: $(VENV)/.ready  ## the same with the full grids (hours; resumes)
	$(call sweep_and_report,)

test: $(VENV)/.ready  ## run the tests (under 12 minutes on 2 cores)
	$(BIN)/python -m pytest -q -n 2

test-slow: $(VENV)/.ready  ## run the long tests too
	$(BIN)/python -m pytest -q -n 2 -m ""

chaos: $(VENV)/.ready  ## attack the program for 15 minutes: kills, damage, odd names, random settings; a table (SEED=0)
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),15) --seed $(or $(SEED),0)

# Without --quiet, with which mkdocs does not count its warnings and builds in spite of them.
docs: $(VENV)/.ready  ## build the documentation into site/, without a network; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: $(VENV)/.ready  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready  ## what the harness costs: a table, and reports/bench.json (an hour on 2 idle cores)
	$(BIN)/python -m harness.bench --out $(REPORTS)/bench.json

gpu: $(VENV)/.ready  ## on a CUDA machine: GPU tests, ResNet-18 and the language model; summary in results/gpu/
	$(BIN)/python -m pytest -q -m gpu tests
	$(BIN)/python -m harness +experiment=gpu device=cuda results=results/gpu-trials
	$(BIN)/python -m analysis.summary --results results/gpu-trials --out results/gpu
	$(BIN)/python -m harness.bench overhead by_hand --out results/gpu/bench.json

scoreboard: $(VENV)/.ready  ## write docs/findings/scoreboard.md, and say what audits made since then say otherwise
	$(BIN)/python -m analysis.scoreboard --new $(RESULTS)

include experiments/trainers/trainers.mk

clean:  ## remove the environment and caches; results and reports stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
