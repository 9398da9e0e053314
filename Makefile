# make demo   the four DAGs, for real, on this machine, to a drafter with a measured acceptance length
# make up     the same stack, left running at http://localhost:8080      make down   stops it
# make demo ENGINE=sglang   the same on a real SGLang, on the CPU
# make test   everything but the long forms
# make test-engines  generation on a real SGLang and a real vLLM, states to and from speculators,
#                    all on the CPU
# make test-airflow  the long forms: pause, engine, alerts and pilot over a whole Airflow
# make lint   ruff and mypy
# make kill-matrix   every way to end a job, on every kind of job, as a table
# make torture       generation, extraction and training killed with -9 at 200, 50 and 30 random moments
# make bench         client, budget, job overhead: a line of JSON each; BENCH=NAME for one

PYTHON ?= python3.11
PORT ?= 8080
ENGINE ?= embedded
DEMO = PYTHONPATH=include .venv/bin/python -m demo
TESTS = @PYTHONPATH=include:plugins:tests .venv/bin/python

.PHONY: setup demo up down test lint clean

setup: .venv/.ready .demo/host-venv/.ready sshd

.venv/.ready: requirements.txt include/requirements.txt tests/requirements.txt
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "setup: $(PYTHON) with venv is missing:" \
	  "install the packages python3.11 and python3.11-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r requirements.txt -r tests/requirements.txt
	.venv/bin/pip check
	touch $@

# The "GPU container" has an environment of its own, without airflow, so that the boundary is real.
.demo/host-venv/.ready: include/requirements.txt .venv/.ready
	$(PYTHON) -m venv .demo/host-venv
	.demo/host-venv/bin/pip install --quiet -r include/requirements.txt
	.demo/host-venv/bin/pip check
	touch $@

# $(call installed,PROGRAM,PACKAGE): of Debian, unless the program is there.
define installed
	@PATH="$$PATH:/usr/sbin" command -v $(1) >/dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then apt=apt-get; else apt="sudo -n env DEBIAN_FRONTEND=noninteractive apt-get"; fi; \
	  $$apt -qq update && DEBIAN_FRONTEND=noninteractive $$apt -qq install -y --no-install-recommends $(2) >/dev/null; \
	} || { echo "setup: $(1) is missing and could not be installed:" \
	  "install the package $(2)" >&2; exit 1; }
endef

.PHONY: sshd chromium
sshd:
	$(call installed,sshd,openssh-server)

chromium:
	$(call installed,chromium,chromium)

demo: setup $(filter sglang,$(ENGINE))
	$(DEMO) run --port $(PORT) --engine $(ENGINE)

up: setup $(filter sglang,$(ENGINE))
	$(DEMO) up --port $(PORT) --engine $(ENGINE)

down:
	$(DEMO) down --port $(PORT)

test: setup chromium lint
	.venv/bin/python -m pytest -n 2 --dist loadfile tests/unit
	.venv/bin/python -m pytest tests/integration

# Real engines, and a public trainer, on the CPU, each in an environment of its own; installed, it
# returns at once.
.PHONY: sglang vllm speculators test-engines
sglang vllm speculators:
	@PYTHON=$(PYTHON) tests/engines/$@_cpu.sh setup .demo/engines/$@

test-engines: .venv/.ready
	@$(MAKE) --no-print-directory --jobs=2 sglang vllm speculators
	.venv/bin/python -m pytest tests/engines

.PHONY: test-airflow
test-airflow: setup chromium
	.venv/bin/python -m pytest -m long tests/integration

.PHONY: kill-matrix torture bench
kill-matrix: setup
	$(TESTS) -m integration.kill_matrix

torture: .venv/.ready
	$(TESTS) -m integration.kill_generate
	$(TESTS) -m integration.kill_extract
	$(TESTS) -m integration.kill_train --kills 20
	$(TESTS) -m integration.kill_train --kills 10 --processes 2

bench: setup
	$(TESTS) -m bench $(BENCH)

lint: .venv/.ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

clean:
	[ ! -x .venv/bin/python ] || $(MAKE) down
	rm -rf .demo .venv
