# shellcheck shell=bash
# Functions of the batch scripts in this folder, which source this file. README.md describes how to submit them.

pmm3d_fail() {
    echo "pmm3d: $*" >&2
    exit 2
}

# Variables that contain the name of a machine. NERSC_HOST: https://docs.nersc.gov/environment/. LMOD_SYSTEM_NAME (OLCF,
# JSC) and SYSTEMNAME (JSC): used by other scripts for these machines, such as https://github.com/easybuilders/JSC.
# CLUSTER_NAME (CSCS): https://docs.cscs.ch/. SLURM_CLUSTER_NAME is set by Slurm:
# https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
PMM3D_MACHINE_NAMES="NERSC_HOST LMOD_SYSTEM_NAME SYSTEMNAME CLUSTER_NAME SLURM_CLUSTER_NAME"

# Prints the name of this machine's settings file in sites/.
pmm3d_site() {
    local variable
    for variable in $PMM3D_MACHINE_NAMES; do
        case ${!variable:-} in
            perlmutter | frontier | lumi) echo "${!variable}" && return ;;
            daint | clariden | santis) echo alps && return ;;
            juwelsbooster | juwels_booster) echo juwels-booster && return ;;
        esac
    done
    echo plain
}

# pmm3d_expect NAME: fails, and names the right settings, if this machine is another one.
pmm3d_expect() {
    local found variable evidence
    found=$(pmm3d_site)
    [ "$found" = "$1" ] && return 0
    evidence="host $(uname -n)"
    for variable in $PMM3D_MACHINE_NAMES; do
        [ -z "${!variable:-}" ] || evidence+=", $variable=${!variable}"
    done
    echo "pmm3d: the settings of $1 do not belong here ($evidence): leave PMM3D_SITE out, or set PMM3D_SITE=$found." \
        "For settings of your own: PMM3D_SITE=/path/to/file.sh" >&2
    return 2
}

# Sets `launch`, the command that starts the ranks under Slurm, and the environment, from the settings file of this
# machine or from the file that PMM3D_SITE names. Under other batch systems only PMM3D_SITE is used.
pmm3d_settings() {
    local file=${PMM3D_SITE:-${SLURM_JOB_ID:+$(pmm3d_site)}}
    [ -z "$file" ] || [[ $file == */* ]] || file=$PMM3D_JOBS/sites/$file.sh
    if [ -n "$file" ] && [ ! -r "$file" ]; then
        pmm3d_fail "PMM3D_SITE=${PMM3D_SITE:-}: there is no $file. There are: $(cd "$PMM3D_JOBS/sites" && echo *.sh)"
    fi
    # shellcheck disable=SC2034 # the scripts use it
    launch=(srun --kill-on-bad-exit=1)
    # shellcheck source=/dev/null
    [ -z "$file" ] || . "$file" || pmm3d_fail "nothing was run"
    # A virtual environment that was active at submission takes precedence over the Python of a module.
    [ -z "${VIRTUAL_ENV:-}" ] || export PATH="$VIRTUAL_ENV/bin:$PATH"
    command -v pmm3d >/dev/null || pmm3d_fail "there is no command pmm3d: activate its environment before submitting," \
        "or load it in ${file:-a file that PMM3D_SITE names}"
    export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$OPENBLAS_NUM_THREADS}"
    export MKL_NUM_THREADS="${MKL_NUM_THREADS:-$OPENBLAS_NUM_THREADS}"
}
