# shellcheck shell=bash
# Alps (Daint, Clariden, Santis), CSCS: HPE Cray EX, 4 NVIDIA GH200 a node, Cray MPICH from a uenv. Not tried on the
# machine. Sources: its documentation, https://docs.cscs.ch/running/slurm/ and the pages named below.
#
#   sbatch -A PROJECT --uenv=prgenv-gnu/24.11:v1 --view=default --nodes=4 --ntasks-per-node=4 --cpus-per-task=72 \
#       jobs/product.sbatch --m 65536 --n 65536 --k 65536 --array cupy
#
# No modules: Python and Cray MPICH are in the uenv that sbatch names (https://docs.cscs.ch/software/uenv/). Build
# mpi4py against this MPICH once, in your environment.

# shellcheck source=jobs/common.sh
. "${BASH_SOURCE[0]%/*}/../common.sh"
pmm3d_expect alps || return

export MPICH_GPU_SUPPORT_ENABLED=1 # https://docs.cscs.ch/software/communication/cray-mpich/

launch+=(--cpu-bind=cores) # https://docs.cscs.ch/running/slurm/
launch+=(--gpu-bind=none)  # lets ranks open their neighbours' memory: https://github.com/BLAST-WarpX/warpx/issues/6382
# srun takes no --cpus-per-task from sbatch since Slurm 22.05: https://slurm.schedmd.com/srun.html#OPT_cpus-per-task
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
