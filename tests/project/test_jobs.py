"""The batch scripts of jobs/: linted, run outside any batch system and with stand-ins for one. Slurm: tests/slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import h5py
import numpy as np
import pytest

from pmm3d.model.environment import Settings

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
SITES = sorted((JOBS / "sites").glob("*.sh"))
SCRIPTS = sorted(path for kind in ("sbatch", "pbs", "lsf", "flux") for path in JOBS.glob(f"*.{kind}"))
ALL = [*SCRIPTS, JOBS / "common.sh", *SITES]
MACHINES = {
    "perlmutter": {"NERSC_HOST": "perlmutter"}, "frontier": {"LMOD_SYSTEM_NAME": "frontier"},
    "lumi": {"SLURM_CLUSTER_NAME": "lumi"}, "alps": {"CLUSTER_NAME": "daint"},
    "juwels-booster": {"SYSTEMNAME": "juwelsbooster"}, "plain": {"SLURM_CLUSTER_NAME": "ours"},
}
INTRO_MPI = "https://cpe.ext.hpe.com/docs/latest/mpt/mpich/intro_mpi.html"
SLURM = "https://slurm.schedmd.com/"
KNOWN = {  # what scripts may set, and where it is documented
    "OPENBLAS_NUM_THREADS": "https://github.com/OpenMathLib/OpenBLAS#setting-the-number-of-threads-using-environment-variables",
    "OMP_NUM_THREADS": "https://www.openmp.org/spec-html/5.0/openmpse50.html",
    "MKL_NUM_THREADS": "https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/",
    "MPICH_GPU_SUPPORT_ENABLED": INTRO_MPI, "MPICH_OFI_NIC_POLICY": INTRO_MPI,
    "FI_MR_CACHE_MONITOR": "https://ofiwg.github.io/libfabric/main/man/fi_mr.3.html",
    "OMPI_MCA_pml": "https://docs.open-mpi.org/en/v5.0.x/mca.html",
    "OPAL_PREFIX": "https://docs.open-mpi.org/en/v5.0.x/installing-open-mpi/installation-location.html",
    "PMIX_MCA_psec": "https://docs.openpmix.org/",
    "I_MPI_PMI_LIBRARY": SLURM + "mpi_guide.html#intel_mpi",
    "CUDA_VISIBLE_DEVICES": "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars",
    "SRUN_CPUS_PER_TASK": SLURM + "srun.html", "PATH": "the shell's",
    **{f"PMM3D_{name}": "jobs/README.md" for name in ("JOBS", "SITE", "RESULTS", "OPTIONS", "RANKS_PER_NODE")},
    "PMM3D_MACHINE_NAMES": "jobs/common.sh",
    **{field.metadata["variable"]: "pmm3d/settings.py" for field in fields(Settings)},
}
BATCH = ("SLURM", "PBS_", "LSB_", "LS_SUBCWD", "FLUX_", "PMM3D_", *(name for one in MACHINES.values() for name in one))


def variables_set(script: str) -> set[str]:
    """Names in capitals that a shell script assigns or exports."""
    code = re.sub(r"(^|\s)#.*", "", script)
    return set(re.findall(r"(?:^|[\s;&|(])(?:export\s+)?([A-Z][A-Za-z0-9]*_[A-Za-z0-9_]*|PATH)=", code))


def environment(**changes) -> dict[str, str]:
    """This environment without any batch system's, with the folder of this Python in front."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(BATCH)}
    base["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return base | {name: str(value) for name, value in changes.items()}


def bash(*words, cwd=ROOT, **changes):
    return subprocess.run(["bash", *map(str, words)], env=environment(**changes), cwd=cwd, capture_output=True,
                          text=True, timeout=90)


@pytest.fixture
def stand_ins(tmp_path):
    """A folder for the front of PATH: stand_ins(name=script) puts programs there."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(**programs) -> str:
        for name, script in programs.items():
            (folder / name).write_text(f"#!/bin/bash\n{script}\n")
            (folder / name).chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    return make


@pytest.mark.parametrize("script", ALL, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    if not shutil.which("shellcheck"):
        remedy = "shellcheck is not installed: make system-packages, or apt-get install shellcheck"
        pytest.fail(remedy) if os.environ.get("PMM3D_CI") == "1" else pytest.skip(remedy)
    done = subprocess.run(["shellcheck", "-x", script.relative_to(ROOT)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", ALL, ids=lambda path: path.name)
def test_every_variable_that_is_set_is_known(script):
    assert variables_set(script.read_text()) <= KNOWN.keys()


@pytest.mark.parametrize("line", ["export MPICH_GPU_SUPORT=1", "PMM3D_TIMOUT=5 srun pmm3d bench", "  OMPI_MCA_plm=ucx",
                                  "[ -n x ] && export SRUN_CPU_PER_TASK=4", "[ -z x ] || FI_MR_CACHE_MONITR=memhooks"])
def test_a_variable_that_is_misspelt_is_found(line):
    assert variables_set((JOBS / "sites" / "lumi.sh").read_text() + line + "\n") - KNOWN.keys()


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_each_line_of_a_site_names_its_source(site):
    """On the line itself, or in a comment of the same paragraph."""
    source = re.compile(r"# .*(https://|guide|as above)")
    for paragraph in site.read_text().split("\n\n"):
        lines = paragraph.splitlines()
        above = any(line.lstrip().startswith("#") and source.search(line) for line in lines)
        for line in lines:
            if re.match(r"\s*(export \w+=|module load|launch\+=)", line):
                assert above or source.search(line), f"{site.name}: {line}"


@pytest.mark.parametrize("site", [site for site in SITES if site.stem != "plain"], ids=lambda path: path.stem)
def test_a_site_says_that_it_was_not_tried_there(site):
    assert "Unverified on the machine itself" in site.read_text().replace("\n# ", " ")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_outside_a_job_a_script_says_how_to_submit_it(script):
    done = bash(script, "some.toml")
    assert done.returncode == 2
    command = {".sbatch": "sbatch ", ".pbs": "qsub ", ".lsf": "bsub < ", ".flux": "flux batch "}[script.suffix]
    assert f"{command}jobs/{script.name}" in done.stderr and not done.stdout


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_a_site_belongs_to_its_machine_only(site, machine, stand_ins):
    path = stand_ins(python3="echo site")
    script = f'module() {{ :; }}; . "{JOBS}/common.sh"; launch=(srun); . "{site}" && echo "${{launch[@]}}"'
    done = bash("-c", script, **MACHINES[machine], PATH=path, VIRTUAL_ENV="")
    if site.stem == machine:
        assert done.returncode == 0 and done.stdout.startswith("srun"), done.stderr
        assert "--gpu-bind=none" in done.stdout or machine == "juwels-booster"
    else:
        assert done.returncode == 2 and not done.stdout
        (name, value), = MACHINES[machine].items()
        assert f"the settings of {site.stem} do not belong here" in done.stderr
        assert f"{name}={value}" in done.stderr and f"PMM3D_SITE={machine}" in done.stderr


def test_a_module_that_cannot_be_loaded_stops_the_job():
    script = f'module() {{ return 1; }}; PMM3D_JOBS="{JOBS}"; . "{JOBS}/common.sh"; pmm3d_settings; echo on'
    done = bash("-c", script, SLURM_JOB_ID=1, **MACHINES["frontier"])
    assert done.returncode == 2 and "nothing was run" in done.stderr and not done.stdout


RUN = f'exec {sys.executable} -m pmm3d.launcher "$@"'
PMM3D = f'exec {sys.executable} -m pmm3d "$@"'
FLUX = r"""
if [ "$1" = resource ]; then echo 2; exit; fi
declare -A said
while [ "$1" != pmm3d ]; do
    case $1 in --nodes=* | --tasks-per-node=*) said[${1%=*}]=${1#*=} ;; esac
    shift
done
exec PYTHON -m pmm3d.launcher -n $((said[--nodes] * said[--tasks-per-node])) "$@"
""".replace("PYTHON", sys.executable)
SMALL = ("--m", "60", "--n", "50", "--k", "40", "--repeat", "1")


@pytest.mark.parametrize("script, words, settings", [
    ("product.pbs", SMALL, {"PBS_JOBID": "1", "PBS_O_WORKDIR": ROOT}),
    ("product.lsf", (), {"LSB_JOBID": "1", "LS_SUBCWD": ROOT, "LSB_DJOB_NUMPROC": "2",
                         "PMM3D_OPTIONS": " ".join(SMALL)}),
    ("product.flux", SMALL, {"FLUX_ENCLOSING_ID": "f1", "PMM3D_RANKS_PER_NODE": "1"}),
])
def test_the_product_under_a_stand_in_for_other_batch_systems(script, words, settings, stand_ins, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("localhost\nlocalhost\n")
    if script.endswith("pbs"):
        settings = settings | {"PBS_NODEFILE": nodes}
    path = stand_ins(mpiexec=RUN, pmm3d=PMM3D, flux=FLUX)
    done = bash(JOBS / script, *words, PATH=path, VIRTUAL_ENV="", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of 2 ranks" in done.stdout and re.search(r"verified +yes", done.stdout)


SRUN = 'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 exec "$@"'
LOG = 'echo "${0##*/} $*" >> "$SLURM_SUBMIT_DIR/log"'


@pytest.mark.parametrize("status, refuses, array, code, called, text", [
    (0, 0, (), 0, "", ": finished"),
    (75, 0, (), 0, "scontrol requeue 7", "not finished: requeueing"),
    (75, 1, (), 75, "scontrol requeue 7", "submit it again, and it goes on"),
    (1, 0, (), 1, "", "failed with status 1; not requeued"),
    (137, 0, (), 137, "", "failed with status 137; not requeued"),
    (0, 0, (2, 4), 0, "scancel --state=PENDING 6", ": finished"),
    (75, 0, (2, 4), 0, "", "the next element of the array goes on"),
    (75, 0, (4, 4), 75, "", "submit it again, and it goes on"),
    (2, 0, (2, 4), 2, "scancel --state=PENDING 6", "failed with status 2"),
])
def test_what_becomes_of_a_training_job(status, refuses, array, code, called, text, stand_ins, tmp_path):
    path = stand_ins(srun=SRUN, pmm3d=f'echo "$*" >&2; exit {status}', scontrol=f"{LOG}; exit {refuses}", scancel=LOG,
                     python3="echo site")
    settings = {"SLURM_JOB_ID": 7, "SLURM_SUBMIT_DIR": tmp_path, "PMM3D_JOBS": JOBS, "PATH": path, "VIRTUAL_ENV": ""}
    if array:
        settings |= {"SLURM_ARRAY_JOB_ID": 6, "SLURM_ARRAY_TASK_ID": array[0], "SLURM_ARRAY_TASK_MAX": array[1]}
    done = bash(JOBS / "train.sbatch", "a.toml", cwd=tmp_path, **settings)
    assert done.returncode == code and text in done.stderr, done.stderr
    assert "train a.toml --resume auto" in done.stderr
    log = tmp_path / "log"
    assert (log.read_text().strip() if log.exists() else "") == called
    assert not list(tmp_path.glob(".pmm3d-unfinished-*"))


@pytest.mark.parametrize("status, called", [(75, True), (143, True), (137, False), (0, None)])
def test_the_signal_before_the_limit_goes_to_the_ranks(status, called, stand_ins, tmp_path):
    """143: the ranks were not yet ready to heed SIGTERM. 0: they had come to the end."""
    rank = f'read -r _ _ _ parent _ </proc/$PPID/stat; kill -USR1 "$parent"; sleep 0.5; exit {status}'
    path = stand_ins(srun=SRUN, pmm3d=rank, scontrol=LOG, scancel=LOG, squeue="echo 7.0", python3="echo site")
    settings = {"SLURM_JOB_ID": 7, "SLURM_SUBMIT_DIR": tmp_path, "PMM3D_JOBS": JOBS, "PATH": path, "VIRTUAL_ENV": ""}
    done = bash(JOBS / "train.sbatch", "a.toml", cwd=tmp_path, **settings)
    log = (tmp_path / "log").read_text().splitlines()
    assert log == ["scancel --signal=TERM 7.0", *(["scontrol requeue 7"] if called else [])], done.stderr
    assert done.returncode == (0 if called or called is None else status)
    assert "the time limit is near: asking for a checkpoint" in done.stderr
    assert not list(tmp_path.glob(".pmm3d-unfinished-*"))


@pytest.mark.parametrize("srun, log", [
    ("sleep 0.5; : > $SLURM_SUBMIT_DIR/began; sleep 3; exit 75", ["scancel --signal=TERM 7.0"]), ("exit 1", []),
], ids=["the ranks begin later", "they never begin"])
def test_a_signal_before_the_ranks_have_begun_waits_for_them(srun, log, stand_ins, tmp_path):
    signal = 'read -r _ _ _ parent _ </proc/$$/stat; kill -USR1 "$parent"'
    path = stand_ins(srun=f"{signal}; {srun}", scancel=LOG, python3="echo site", pmm3d="",
                     squeue='[ ! -e "$SLURM_SUBMIT_DIR/began" ] || echo 7.0')
    settings = {"SLURM_JOB_ID": 7, "SLURM_SUBMIT_DIR": tmp_path, "PMM3D_JOBS": JOBS, "PATH": path, "VIRTUAL_ENV": ""}
    done = bash(JOBS / "train.sbatch", "a.toml", cwd=tmp_path, **settings)
    assert "asking for a checkpoint" in done.stderr and "failed with status" in done.stderr
    assert ((tmp_path / "log").read_text().splitlines() if log else list(tmp_path.glob("log"))) == log


def test_train_without_a_configuration_says_so():
    done = bash(JOBS / "train.sbatch", SLURM_JOB_ID=7, SLURM_SUBMIT_DIR=ROOT)
    assert done.returncode == 2 and "which configuration?" in done.stderr


def test_a_requeued_training_without_a_checkpoint_is_an_error_on_every_rank(job, tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.ones((40, 3), "float32"), np.arange(40) % 2
    config = tmp_path / "a.toml"
    config.write_text(f'[data]\nfile = "{tmp_path}/data.h5"\nbatch_size = 8\n[network]\nhidden = [4]\n'
                      f'[training]\nfolder = "{tmp_path}/run"\nepochs = 1\n')
    train = "import sys\nfrom pmm3d.tools.cli import main\nsys.argv[0] = 'pmm3d'\nmain()"
    done = job(2, train, "train", config, "--resume", "auto", env={"SLURM_RESTART_COUNT": 1})
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if "Error" in line]
    assert len(said) == 1 and "CheckpointError: this job was requeued (restart 1)" in said[0]
    assert f"{tmp_path}/run/checkpoints" in said[0] and "Submit a new job" in said[0]
    assert not (tmp_path / "run/metrics.jsonl").exists() and not list((tmp_path / "run").glob("checkpoints/step-*"))
    assert job(2, train, "train", config, "--resume", "auto", env={"SLURM_RESTART_COUNT": 0}).returncode == 0
    assert job(2, train, "train", config, "--resume", "auto", env={"SLURM_RESTART_COUNT": 2}).returncode == 0


def scaling(folder, *words):
    return subprocess.run([sys.executable, ROOT / "jobs/scaling.py", folder, *words], env=environment(), text=True,
                          capture_output=True, timeout=90)


def test_scaling_is_shown_beside_the_limit_and_the_fewest_ranks(tmp_path):
    for kind, ranks, gflops in (("strong", 8, 300.0), ("strong", 4, 200.0), ("weak", 4, 200.0), ("weak", 8, 380.0)):
        result = {"m": 96, "n": 97, "k": 98, "ranks": ranks, "grid": [1, 2, ranks // 2], "seconds": [0.3, 0.1, 0.2],
                  "gflops": gflops, "ratio": gflops / ranks / 60, "verified": True,
                  "environment": {"hosts": ["a"] * (ranks // 4)}}
        (tmp_path / f"{kind}-{ranks:05}.json").write_text(json.dumps([result] if kind == "weak" else result))
    done = scaling(tmp_path, "--plot", tmp_path / "a.png")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("│ ").split("│") for line in done.stdout.splitlines() if "96, 97, 98" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["strong", "4", "1", "96, 97, 98", "1x2x2", "200.00", "200.0", "0.833", "1.000", "yes"],
        ["strong", "8", "2", "96, 97, 98", "1x2x4", "200.00", "300.0", "0.625", "0.750", "yes"],
        ["weak", "4", "1", "96, 97, 98", "1x2x2", "200.00", "200.0", "0.833", "1.000", "yes"],
        ["weak", "8", "2", "96, 97, 98", "1x2x4", "200.00", "380.0", "0.792", "0.950", "yes"]]
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"
    (tmp_path / "weak-00016.json").write_text('{"m": 9')
    done = scaling(tmp_path)
    assert done.returncode == 1 and "weak-00016.json is not a result of pmm3d bench" in done.stderr
    assert done.stdout.count("96, 97, 98") == 4


def test_no_figures_of_scaling(tmp_path):
    done = scaling(tmp_path)
    assert done.returncode == 2 and "jobs/scaling.sbatch writes them" in done.stderr
