# shellcheck shell=bash
# JUWELS Booster, JSC: 4 NVIDIA A100 a node, InfiniBand, Open MPI with UCX. Not tried on the machine. Sources: its
# documentation, https://apps.fz-juelich.de/jsc/hps/juwels/, and scripts of other projects.
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

# Open MPI over UCX accepts device pointers: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/cuda.html
export OMPI_MCA_pml=ucx

# By default JSC's Slurm makes one GPU visible to each rank (from scripts of other projects). Then ranks cannot open the
# memory of their neighbours' GPUs (https://github.com/open-mpi/ompi/issues/11949). So make all four GPUs visible.
export CUDA_VISIBLE_DEVICES=0,1,2,3
launch+=(--cpu-bind=cores) # https://apps.fz-juelich.de/jsc/hps/juwels/affinity.html
# srun takes no --cpus-per-task from sbatch since Slurm 22.05: https://slurm.schedmd.com/srun.html#OPT_cpus-per-task
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
