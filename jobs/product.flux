#!/bin/bash
#flux: --job-name=pmm3d-product
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=10m
#flux: --output=pmm3d-product-{{id}}.out

# product.sbatch for Flux: multiply two matrices on all ranks of the job, verify, time.
#
#   flux batch jobs/product.flux                                                    4096 cubed on 8 ranks
#   PMM3D_RANKS_PER_NODE=8 flux batch --nodes=16 jobs/product.flux --m 65536 --n 65536 --k 65536 --array cupy

# https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
if [ -z "${FLUX_ENCLOSING_ID:-}" ]; then
    echo "pmm3d: this is not inside a Flux job: flux batch jobs/product.flux" >&2
    exit 2
fi
PMM3D_JOBS=${PMM3D_JOBS:-$PWD/jobs} # Flux runs a copy of this script in the folder of submission
# shellcheck source=jobs/common.sh
. "$PMM3D_JOBS/common.sh" || {
    echo "pmm3d: submit from the folder that contains jobs/, or set PMM3D_JOBS to the path of jobs/" >&2
    exit 2
}
pmm3d_settings
# All GPUs of the node stay visible to each rank; each rank selects one.
# https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-run.html
nodes=$(flux resource list --states=free --no-header --format='{nnodes}')
flux run --nodes="$nodes" --tasks-per-node="${PMM3D_RANKS_PER_NODE:-4}" -o gpu-affinity=off -o cpu-affinity=per-task \
    pmm3d bench "$@"
