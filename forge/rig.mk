# The rig @RIG@. Needs nothing outside this folder; `make` alone lists the targets.
# The acting targets call the rig's tools through launch.py, on the path that clients use too.

PYTHON ?= python3
PROMPT ?= In one sentence: what are you?
YES ?=
DEPLOY ?=
TESTS ?= test_server
WAIT_S ?= 50
BENCH ?=

LAUNCH := $(PYTHON) launch.py
CALL := $(LAUNCH) call
SKILL := @SLUG@-management
RUFF_FLAGS := --isolated --line-length 100 --target-version py311

# A prompt is taken as it stands: make would expand its $(…), a shell its quotes and backticks.
export RIG_PROMPT := $(value PROMPT)
unexport PROMPT
export RIG_FIELD := import json, sys; print(json.load(sys.stdin)[sys.argv[1]])

.DEFAULT_GOAL := help
.PHONY: help install test lint run tools skill skill-install skill-install-agy skill-zip \
	preflight deploy status endpoint query benchmark destroy

help: ## list the targets
	@echo "@RIG@"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

install: ## get the packages into your cache folder, once
	@$(LAUNCH) install

# What the tests alone need is fetched before the first of them, where there is such a thing.
test: ## run this rig's own tests, offline (TESTS=test_server.CatalogueSuite: some of them)
	@if [ -f requirements-test.txt ] && [ -z "$$RIG_PACKAGES" ]; then $(LAUNCH) install --for-tests; fi
	@$(LAUNCH) python -m unittest $(TESTS)

lint: ## check the Python files with ruff
	@if $(LAUNCH) python -m ruff --version >/dev/null 2>&1; then ruff="$(LAUNCH) python -m ruff"; \
	elif command -v ruff >/dev/null; then ruff=ruff; \
	else echo "ruff is missing. Get it: $(PYTHON) -m pip install --user ruff" >&2; exit 1; fi; \
	set -e -- *.py; \
	$$ruff check $(RUFF_FLAGS) --select E,F,I,UP,B "$$@"; \
	$$ruff format $(RUFF_FLAGS) --check "$$@"

run: ## run the MCP server over stdio, as a client does (Ctrl-C ends it)
	@$(LAUNCH)

tools: ## renew the tool list and the other built texts
	@$(LAUNCH) docs

skill: ## renew the skill in skills/
	@$(LAUNCH) docs

skill-install: ## copy the skill to ~/.claude/skills
	@$(call install_skill,$${HOME:?is not set}/.claude/skills)

skill-install-agy: ## copy the skill to Antigravity's folder, where there is one
	@for root in "$${HOME:?is not set}/.gemini/config" "$$HOME/.gemini/antigravity-cli" "$$HOME/.gemini"; \
	do if [ -d "$$root" ]; then $(call install_skill,$$root/skills); exit; fi; done; \
	echo "No Antigravity here: none of ~/.gemini/config, ~/.gemini/antigravity-cli and ~/.gemini" \
		"exists. Nothing was written." >&2; exit 1

# Replaces a folder of exactly the skill's name, and only once its successor is complete.
define install_skill
set -e; target="$(1)/$(SKILL)"; mkdir -p "$(1)"; rm -rf "$$target.new"; \
cp -R "skills/$(SKILL)" "$$target.new"; rm -rf "$$target"; mv "$$target.new" "$$target"; \
echo "wrote $$target"
endef

skill-zip: ## pack the skill into dist/, for clients that take an upload
	@$(LAUNCH) skill-zip

preflight: ## say what is missing on this machine and how to get it
	@$(LAUNCH) preflight

# 160 waits of 50 s, the most that a tool waits, are over two hours: a machine that has to build its
# server first may take more than one.
# Where a machine has to be rented first, its price is shown and the user is asked (YES=1 does not).
deploy: ## start the model and wait until it has answered for the first time
	@wait=$$($(CALL) list | awk '/^wait_for_/ { print $$1; exit }'); \
	start=$$($(CALL) list | awk '$$1 == "serve_model" || /^find_/ { print $$1; exit }'); \
	field() { printf '%s' "$$answer" | $(PYTHON) -c "$$RIG_FIELD" "$$1"; }; \
	case $$start in find_*) \
		$(CALL) estimate_deployment_cost || exit 1; \
		if [ "$(YES)" = 1 ]; then answer=y; \
		elif [ -t 0 ]; then printf 'Rent a machine? [y/N] '; read -r answer; \
		else echo "Nothing was done: there is no terminal to ask at. YES=1 does not ask." >&2; exit 1; fi; \
		case $$answer in [yY]*) ;; *) echo "Nothing was done."; exit 1 ;; esac ;; \
	esac; \
	answer=$$($(CALL) --json $$start wait_s=$(WAIT_S) $(DEPLOY)) || exit 1; round=0; \
	while case $$(field state) in queued|running) true ;; *) false ;; esac; do \
		answer=$$($(CALL) --json get_job job_id=$$(field job_id) wait_s=$(WAIT_S)) || exit 1; \
		field summary; done; \
	case $$(field state) in done) \
		answer=$$($(CALL) --json "$$wait" wait_s=$(WAIT_S)) || exit 1 ;; esac; \
	while [ "$$(field state)" = starting ] && [ $$round -lt 160 ]; do \
		round=$$((round + 1)); answer=$$($(CALL) --json "$$wait" wait_s=$(WAIT_S)) || exit 1; done; \
	field summary; [ "$$(field state)" = ready ]

status: ## what runs, with every setting and where it came from
	@$(CALL) get_system_status

endpoint: ## the address of the served model
	@$(CALL) $$($(CALL) list | awk '$$1 ~ /^get_(vllm_)?endpoint$$/ { print $$1; exit }')

query: ## ask the model: make query PROMPT='…'
	@$(CALL) query_gemma4 "prompt=$$RIG_PROMPT"

# Words of its own: make benchmark BENCH='concurrency=[1,2] context_tokens=[64,512] output_tokens=32'
benchmark: ## measure the served model over a grid (BENCH='concurrency=[1,4] …') and save a report
	@tool=$$($(CALL) list | awk '/^run_.*benchmark / { print $$1; exit }'); \
	field() { printf '%s' "$$answer" | $(PYTHON) -c "$$RIG_FIELD" "$$1"; }; \
	answer=$$($(CALL) --json "$$tool" $(BENCH)) || exit 1; job=$$(field job_id); \
	while answer=$$($(CALL) --json get_job job_id=$$job wait_s=$(WAIT_S)) || exit 1; \
		case $$(field state) in queued|running) true ;; *) false ;; esac; do :; done; \
	field summary; [ "$$(field state)" = done ] && $(CALL) list_reports

destroy: ## show what runs, ask, then end it (YES=1 does not ask)
	@if $(CALL) list | grep -q '^plan_destroy '; then \
		$(LAUNCH) take-down $(if $(filter 1,$(YES)),--yes); exit; fi; \
	$(CALL) get_system_status; echo; \
	if [ "$(YES)" = 1 ]; then answer=y; \
	elif [ -t 0 ]; then printf 'Stop the model? [y/N] '; read -r answer; \
	else echo "Nothing was done: there is no terminal to ask at. YES=1 does not ask." >&2; exit 1; fi; \
	case $$answer in \
		[yY]*) $(CALL) stop_model ;; \
		*) echo "Nothing was done." ;; \
	esac
