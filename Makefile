# The two commands of the README are `make demo` and `make test`; both set up what is missing.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2
OLD_TRITON := 3.6.0
NEW_TRITON := 3.9.0
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint test-versions prove mutants setup clean

demo:
	@$(PYTHON) tools/setup.py demo
	@mkdir -p out
	@$(BIN)/nearlight optimize smollm2-135m --task train --batch 8 --seq 2048 \
		--html out/report.html --json out/report.json

setup:
	@$(PYTHON) tools/setup.py dev

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q --durations 15 tests
	$(BIN)/python -m nearlight.workbench.prove --due --jobs $(JOBS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files '*.cu' '*.cuh' | xargs -r $(BIN)/clang-format --dry-run -Werror

# The H200 results were taken with the old Triton; users may have the new one.
test-versions: setup
	@for version in $(OLD_TRITON) $(NEW_TRITON); do \
		$(PYTHON) tools/setup.py triton $$version || exit 1; \
		echo "values with triton $$version"; \
		PYTHONPATH=$$PWD/.venv/triton-$$version $(BIN)/python -m pytest -n $(JOBS) -q \
			-m "not slow" tests/core/interpreter tests/core/test_interpreter.py \
			tests/core/test_triton.py tests/ops || exit 1; \
	done

# Runs every proof and compiles every kernel for every arch, and rewrites the records; needed after
# a change in core/. `make test` proves what changed since its record and two more drawn by date.
prove: setup
	$(BIN)/python -m nearlight.workbench.prove --jobs $(JOBS)

# Breaks our own kernels in one place each and asks whether `check` notices; rewrites the result.
mutants: setup
	$(BIN)/python tools/mutants.py --jobs $(JOBS)

clean:
	rm -rf .venv out build dist
