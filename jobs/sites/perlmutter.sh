# shellcheck shell=bash
# Perlmutter, NERSC: HPE Cray EX, 4 NVIDIA A100 a GPU node, Cray MPICH. Not tried on the machine. Sources: its
# documentation and scripts of other projects.
#
#   sbatch -A PROJECT_g -C gpu -q regular --nodes=4 --ntasks-per-node=4 --cpus-per-task=32 --gpus-per-node=4 \
#       jobs/product.sbatch --m 65536 --n 65536 --k 65536 --array cupy
#   (https://docs.nersc.gov/systems/perlmutter/running-jobs/)

# shellcheck source=jobs/common.sh
. "${BASH_SOURCE[0]%/*}/../common.sh"
pmm3d_expect perlmutter || return

module load python || return      # https://docs.nersc.gov/development/languages/python/nersc-python/
module load cudatoolkit || return # https://docs.nersc.gov/development/languages/python/using-python-perlmutter/
# Build mpi4py against Cray MPICH with GPU support once, in your environment:
#   MPICC="cc -target-accel=nvidia80 -shared" pip install --force --no-cache-dir --no-binary=mpi4py mpi4py
#   (https://docs.nersc.gov/development/languages/python/using-python-perlmutter/)

export MPICH_GPU_SUPPORT_ENABLED=1 # https://cpe.ext.hpe.com/docs/latest/mpt/mpich/intro_mpi.html
# Each rank uses the nearest network card.
# https://github.com/BLAST-WarpX/warpx/blob/development/Tools/machines/perlmutter-nersc/perlmutter_gpu.sbatch
export MPICH_OFI_NIC_POLICY=GPU

launch+=(--cpu-bind=cores) # https://docs.nersc.gov/jobs/affinity/
launch+=(--gpu-bind=none)  # lets ranks open their neighbours' memory: https://github.com/BLAST-WarpX/warpx/issues/6382
# srun takes no --cpus-per-task from sbatch since Slurm 22.05: https://slurm.schedmd.com/srun.html#OPT_cpus-per-task
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
