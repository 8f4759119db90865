# For people who change the rigs' common sources. A rig needs none of this: see its own Makefile.
# Nothing has to be installed before: packages go into a folder of your cache, once.

PYTHON ?= python3
RIG ?= local-pytorch-cpu-2b

RUN := $(PYTHON) tests/run.py
WITH_PACKAGES := $(RUN) --python

.DEFAULT_GOAL := help
.PHONY: help demo test test-rigs test-real build check diff eject lint format typecheck bench-startup calibrate rollup \
	bench-client bench-triage bench-local bench-sweep bench-engine aot

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: ## watch a real model being started, questioned and stopped through the first rig
	@$(PYTHON) $(RIG)/launch.py install
	@$(PYTHON) $(RIG)/launch.py python -m forge.demo $(RIG)

test: ## run everything: static checks, all tests, every rig's suite, the heart of one on every Python here
	@$(RUN)

test-rigs: ## run every rig's suite whole: make test runs what several rigs share in one of them
	@$(RUN) rigs

test-real: ## run the tests with real engines: builds llama.cpp and installs vLLM, once
	@$(RUN) real

build: ## write every built file of every rig from forge/
	@$(WITH_PACKAGES) -m forge.build

check: ## say what does not hold across the rigs, and how large they are
	@$(WITH_PACKAGES) -m forge.check

diff: ## show what differs between two rigs: make diff A=… B=…
	@$(WITH_PACKAGES) -m forge.build --diff $(A) $(B)

eject: ## make a rig's server.py its own from now on: make eject RIG=…
	@$(WITH_PACKAGES) -m forge.eject $(RIG)

lint: ## check style and format of all Python files
	@$(RUN) lint format

format: ## bring all Python files into form
	@$(RUN) --format

typecheck: ## check the types in forge/
	@$(RUN) typecheck

bench-startup: ## measure what a client waits for until the server answers, beside a bare server
	@$(PYTHON) $(RIG)/launch.py install
	@$(PYTHON) $(RIG)/launch.py python -m forge.bench_startup --rig $(RIG)

calibrate: ## print the planner's predictions beside reported figures
	@$(WITH_PACKAGES) -m forge.calibration

rollup: ## write benchmarks/ROLLUP.md over all reports
	@$(WITH_PACKAGES) -m forge.rollup

bench-client: ## measure what a token costs the load generator, beside other clients
	@$(WITH_PACKAGES) -m forge.bench_client

bench-local: ## measure the local rigs side by side with the embedded model, and this computer's bandwidth
	@$(WITH_PACKAGES) -m forge.bench_local

bench-triage: ## measure how well and how fast the failure bank finds the deciding line
	@$(WITH_PACKAGES) -m forge.bench_triage

bench-sweep: ## simulate 200 markets: the sweep beside asking in turn and asking everywhere
	@$(WITH_PACKAGES) -m forge.bench_sweep

bench-engine: ## measure the JAX engine beside transformers, vLLM and llama.cpp; the table goes into its README
	@$(WITH_PACKAGES) -m forge.bench_engine $(ARGS)

aot: ## compile the JAX engine's programs for TPUs and cards that are not here; the table goes into its README
	@$(WITH_PACKAGES) -m forge.aot $(ARGS)
