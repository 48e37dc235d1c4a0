# shellcheck shell=bash
# JUWELS Booster, JSC: 4 NVIDIA A100 a node, InfiniBand, Open MPI with UCX. Unverified on the machine itself: from its
# documentation, https://apps.fz-juelich.de/jsc/hps/juwels/, and from the scripts of others.
#
#   sbatch -A PROJECT -p booster --nodes=4 --ntasks-per-node=4 --cpus-per-task=12 --gres=gpu:4 \
#       jobs/product.sbatch --m 65536 --n 65536 --k 65536 --array cupy

# shellcheck source=jobs/common.sh
. "${BASH_SOURCE[0]%/*}/../common.sh"
pmm3d_expect juwels-booster || return

# https://github.com/BLAST-WarpX/warpx/blob/development/Tools/machines/juwels-jsc/juwels_warpx.profile.example
module load GCC || return
module load CUDA || return
module load OpenMPI || return
module load Python || return
module load mpi4py || return # https://apps.fz-juelich.de/jsc/hps/juwels/software-modules.html

# Open MPI over UCX takes device pointers: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/cuda.html
export OMPI_MCA_pml=ucx

# All four GPUs visible: JSC's Slurm shows each rank its own one otherwise, and ranks then cannot open their neighbours'
# memory (https://github.com/open-mpi/ompi/issues/11949); the first half is from scripts of others.
export CUDA_VISIBLE_DEVICES=0,1,2,3
launch+=(--cpu-bind=cores) # https://apps.fz-juelich.de/jsc/hps/juwels/affinity.html
# srun takes no --cpus-per-task from sbatch since Slurm 22.05: https://slurm.schedmd.com/srun.html#OPT_cpus-per-task
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
