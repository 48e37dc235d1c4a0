# shellcheck shell=bash
# What the batch scripts of this folder share; they source it. README.md says how to submit them.

pmm3d_fail() {
    echo "pmm3d: $*" >&2
    exit 2
}

# Variables by which machines give their names. NERSC_HOST: https://docs.nersc.gov/environment/. LMOD_SYSTEM_NAME (OLCF,
# JSC) and SYSTEMNAME (JSC): as the Makefiles and scripts of others there use them, such as
# https://github.com/easybuilders/JSC. CLUSTER_NAME (CSCS): https://docs.cscs.ch/. The last is Slurm's own, for all:
# https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
PMM3D_MACHINE_NAMES="NERSC_HOST LMOD_SYSTEM_NAME SYSTEMNAME CLUSTER_NAME SLURM_CLUSTER_NAME"

# Prints the name of the settings file in sites/ that is for this machine.
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

# pmm3d_expect NAME: fails, and says what would fit, unless this machine is that site.
pmm3d_expect() {
    local found variable evidence
    found=$(pmm3d_site)
    [ "$found" = "$1" ] && return 0
    evidence="host $(uname -n)"
    for variable in $PMM3D_MACHINE_NAMES; do
        [ -z "${!variable:-}" ] || evidence+=", $variable=${!variable}"
    done
    echo "pmm3d: the settings of $1 do not belong here ($evidence): leave PMM3D_SITE out, or PMM3D_SITE=$found." \
        "Settings of your own: PMM3D_SITE=/path/to/file.sh" >&2
    return 2
}

# Sets `launch`, the command by which Slurm starts the ranks, and the environment: from the settings file of this site,
# or the one that PMM3D_SITE names, by name or path. Under another batch system only PMM3D_SITE counts.
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
    # A virtual environment that was active at submission comes before the Python of a module.
    [ -z "${VIRTUAL_ENV:-}" ] || export PATH="$VIRTUAL_ENV/bin:$PATH"
    command -v pmm3d >/dev/null || pmm3d_fail "there is no command pmm3d: activate the environment that has it before" \
        "submitting, or load it in ${file:-a file that PMM3D_SITE names}"
    export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$OPENBLAS_NUM_THREADS}"
    export MKL_NUM_THREADS="${MKL_NUM_THREADS:-$OPENBLAS_NUM_THREADS}"
}
