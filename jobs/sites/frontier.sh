# shellcheck shell=bash
# Frontier, OLCF: HPE Cray EX, 8 GPUs (the halves of 4 AMD MI250X) a node, Cray MPICH. Not tried on the machine. Source:
# its user guide, https://docs.olcf.ornl.gov/systems/frontier_user_guide.html, called "guide" below.
#
#   sbatch -A PROJECT -p batch --nodes=4 --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-node=8 \
#       jobs/product.sbatch --m 65536 --n 65536 --k 65536 --array cupy

# shellcheck source=jobs/common.sh
. "${BASH_SOURCE[0]%/*}/../common.sh"
pmm3d_expect frontier || return

module load cray-python || return           # https://docs.olcf.ornl.gov/software/python/index.html
module load rocm || return                  # guide, "GPU-Aware MPI"
module load craype-accel-amd-gfx90a || return # guide, "GPU-Aware MPI"
# Build mpi4py against Cray MPICH once, in your environment: MPICC="cc -shared" pip install --no-binary=mpi4py mpi4py
#   (https://docs.olcf.ornl.gov/software/python/parallel_h5py.html)

export MPICH_GPU_SUPPORT_ENABLED=1 # guide, "GPU-Aware MPI"
# Monitor of the cache of registered memory. The default monitor failed with Python's allocations.
# https://github.com/BLAST-WarpX/warpx/blob/development/Tools/machines/frontier-olcf/submit.sh
export FI_MR_CACHE_MONITOR=memhooks

launch+=(--cpu-bind=threads) # guide, "Slurm"; seven cores a rank, because the system reserves one of each eight
launch+=(--gpu-bind=none) # lets ranks open their neighbours' memory: https://github.com/BLAST-WarpX/warpx/issues/6382
# srun takes no --cpus-per-task from sbatch since Slurm 22.05: https://slurm.schedmd.com/srun.html#OPT_cpus-per-task
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
