# shellcheck shell=bash
# LUMI-G, CSC: HPE Cray EX, 8 GPUs (the halves of 4 AMD MI250X) a node, Cray MPICH. Not tried on the machine. Source:
# its documentation, https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/lumig-job/, called "guide" below.
#
#   sbatch -A PROJECT -p standard-g --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 \
#       jobs/product.sbatch --m 65536 --n 65536 --k 65536 --array cupy

# shellcheck source=jobs/common.sh
. "${BASH_SOURCE[0]%/*}/../common.sh"
pmm3d_expect lumi || return

module load LUMI || return        # https://docs.lumi-supercomputer.eu/software/softwarestacks/
module load partition/G || return # as above
module load cray-python || return # https://docs.lumi-supercomputer.eu/software/installing/python/
module load rocm || return        # guide

export MPICH_GPU_SUPPORT_ENABLED=1 # guide
# https://github.com/BLAST-WarpX/warpx/blob/development/Tools/machines/lumi-csc/lumi.sbatch
export FI_MR_CACHE_MONITOR=memhooks

# Seven cores a rank, next to GPU 0, 1, ... 7 in turn. The system reserves the first core of each eight (guide).
launch+=("--cpu-bind=mask_cpu:fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000")
launch+=(--gpu-bind=none) # lets ranks open their neighbours' memory: https://github.com/BLAST-WarpX/warpx/issues/6382
