"""The batch scripts of jobs/: linted, run outside any batch system and with stand-ins for one. Slurm: tests/slurm."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pytest
from loops import given
from missing import skip_or_fail

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
SITES = sorted((JOBS / "sites").glob("*.sh"))
SCRIPTS = sorted(path for kind in ("sbatch", "pbs", "lsf", "flux") for path in JOBS.glob(f"*.{kind}"))
ALL = [*SCRIPTS, JOBS / "common.sh", *SITES]
MACHINES = {
    "perlmutter": {"NERSC_HOST": "perlmutter"},
    "frontier": {"LMOD_SYSTEM_NAME": "frontier"},
    "lumi": {"SLURM_CLUSTER_NAME": "lumi"},
    "alps": {"CLUSTER_NAME": "daint"},
    "juwels-booster": {"SYSTEMNAME": "juwelsbooster"},
    "plain": {"SLURM_CLUSTER_NAME": "ours"},
}
BATCH = ("SLURM", "PBS_", "LSB_", "LS_SUBCWD", "FLUX_", "PMM3D_", *(name for one in MACHINES.values() for name in one))


def environment(**changes) -> dict[str, str]:
    """This environment without variables of batch systems, with the folder of this Python first in PATH."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(BATCH)}
    base["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return base | {name: str(value) for name, value in changes.items()}


class Row(NamedTuple):
    """A script, or "-c" and lines, with its arguments, its variables and its working folder."""

    words: tuple
    variables: dict = {}
    cwd: Path = ROOT


def bash(folder: Path, rows: list[Row]) -> list[subprocess.CompletedProcess]:
    """Run a table of rows in parallel, under one bash. Returns the end of each."""
    lines = []
    for number, row in enumerate(rows):
        variables = shlex.join(f"{name}={value}" for name, value in row.variables.items())
        line = f"cd {shlex.quote(str(row.cwd))}; exec env {variables} bash {shlex.join(map(str, row.words))}"
        lines.append(f"{{ ({line}) >{number}.out 2>{number}.err; echo $? >{number}.code; }} &")
    done = subprocess.run(
        ["bash", "-c", "\n".join([*lines, "wait"])],
        env=environment(),
        cwd=folder,
        timeout=180,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    texts = [
        [(folder / f"{number}.{kind}").read_text() for kind in ("code", "out", "err")] for number in range(len(rows))
    ]
    return [subprocess.CompletedProcess(row.words, int(code), out, err) for row, (code, out, err) in zip(rows, texts)]


def stand_ins(folder: Path, **programs: str) -> str:
    """Write programs into a folder. Returns a PATH that begins with the folder."""
    folder.mkdir(parents=True)
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_shellcheck_finds_nothing():
    if not shutil.which("shellcheck"):
        skip_or_fail("shellcheck is not installed: make system-packages, or apt-get install shellcheck")
    scripts = [script.relative_to(ROOT) for script in ALL]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_outside_a_job_a_script_says_how_to_submit_it(tmp_path):
    commands = {".sbatch": "sbatch ", ".pbs": "qsub ", ".lsf": "bsub < ", ".flux": "flux batch "}
    for script, done in zip(SCRIPTS, bash(tmp_path, [Row((script, "some.toml")) for script in SCRIPTS])):
        with given(script=script.name):
            assert done.returncode == 2 and not done.stdout
            assert f"{commands[script.suffix]}jobs/{script.name}" in done.stderr


def test_a_site_belongs_to_its_machine_only(tmp_path):
    own = {"PATH": stand_ins(tmp_path / "bin", python3="echo site"), "VIRTUAL_ENV": ""}
    pairs = [(site, machine) for site in SITES for machine in MACHINES]
    rows = [
        Row(
            ("-c", f'module() {{ :; }}; . "{JOBS}/common.sh"; launch=(srun); . "{site}" && echo "${{launch[@]}}"'),
            MACHINES[machine] | own,
        )
        for site, machine in pairs
    ]
    for (site, machine), done in zip(pairs, bash(tmp_path, rows)):
        with given(site=site.stem, machine=machine):
            if site.stem == machine:
                assert done.returncode == 0 and done.stdout.startswith("srun"), done.stderr
                assert "--gpu-bind=none" in done.stdout or machine == "juwels-booster"
            else:
                assert done.returncode == 2 and not done.stdout
                ((name, value),) = MACHINES[machine].items()
                assert f"the settings of {site.stem} do not belong here" in done.stderr
                assert f"{name}={value}" in done.stderr and f"PMM3D_SITE={machine}" in done.stderr


def test_a_module_that_cannot_be_loaded_stops_the_job(tmp_path):
    script = f'module() {{ return 1; }}; PMM3D_JOBS="{JOBS}"; . "{JOBS}/common.sh"; pmm3d_settings; echo on'
    [done] = bash(tmp_path, [Row(("-c", script), {"SLURM_JOB_ID": 1, **MACHINES["frontier"]})])
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


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("echo rank: $*", id="words"),
        pytest.param(PMM3D, id="product", marks=pytest.mark.thorough("the product itself on three pairs of ranks")),
    ],
)
def test_the_product_under_a_stand_in_for_other_batch_systems(tmp_path, program):
    """Each script starts 2 ranks of the same command. With --all, these ranks multiply."""
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    own = {"PATH": stand_ins(tmp_path / "bin", mpiexec=RUN, pmm3d=program, flux=FLUX), "VIRTUAL_ENV": ""}
    scripts = {
        "product.pbs": (SMALL, {"PBS_JOBID": 1, "PBS_O_WORKDIR": ROOT, "PBS_NODEFILE": tmp_path / "nodes"}),
        "product.lsf": (
            (),
            {"LSB_JOBID": 1, "LS_SUBCWD": ROOT, "LSB_DJOB_NUMPROC": 2, "PMM3D_OPTIONS": " ".join(SMALL)},
        ),
        "product.flux": (SMALL, {"FLUX_ENCLOSING_ID": "f1", "PMM3D_RANKS_PER_NODE": 1}),
    }
    rows = [Row((JOBS / script, *words), settings | own) for script, (words, settings) in scripts.items()]
    for script, done in zip(scripts, bash(tmp_path, rows)):
        with given(script=script):
            assert done.returncode == 0, done.stdout + done.stderr
            if program == PMM3D:
                assert "of 2 ranks" in done.stdout and re.search(r"verified +yes", done.stdout)
            else:
                assert done.stdout.splitlines() == [f"rank: bench {' '.join(SMALL)}"] * 2, done.stdout


SRUN = 'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 exec "$@"'
LOG = 'echo "${0##*/} $*" >> "$SLURM_SUBMIT_DIR/log"'
UNTIL = 'for _ in {1..600}; do [ ! -e "$SLURM_SUBMIT_DIR/%s" ] || break; sleep 0.05; done; '
"""Wait for a file in the folder of the job, with a time limit."""


def trainings(folder: Path, cases: list[tuple[dict, dict]]) -> list[tuple[subprocess.CompletedProcess, list[str]]]:
    """Run jobs/train.sbatch once for each (programs in place of Slurm's, variables). Returns its end, and the calls of
    programs that log."""
    rows = []
    for number, (programs, variables) in enumerate(cases):
        submitted = folder / f"job{number}"
        path = stand_ins(submitted / "bin", python3="echo site", **programs)
        settings = {
            "SLURM_JOB_ID": 7,
            "SLURM_SUBMIT_DIR": submitted,
            "PMM3D_JOBS": JOBS,
            "VIRTUAL_ENV": "",
            "PATH": path,
        }
        rows.append(Row((JOBS / "train.sbatch", "a.toml"), settings | variables, submitted))
    ends = bash(folder, rows)
    assert not list(folder.glob("job*/.pmm3d-unfinished-*")), "the script leaves no file of its own"
    logs = [row.cwd / "log" for row in rows]
    return [(done, log.read_text().splitlines() if log.exists() else []) for done, log in zip(ends, logs)]


def test_what_becomes_of_a_training_job(tmp_path):
    cases = [  # exit status of the training, of scontrol; element and last element of an array; what follows
        (0, 0, (), 0, [], ": finished"),
        (75, 0, (), 0, ["scontrol requeue 7"], "not finished: requeueing"),
        (75, 1, (), 75, ["scontrol requeue 7"], "submit the job again to continue"),
        (1, 0, (), 1, [], "failed with status 1; not requeued"),
        (137, 0, (), 137, [], "failed with status 137; not requeued"),
        (0, 0, (2, 4), 0, ["scancel --state=PENDING 6"], ": finished"),
        (75, 0, (2, 4), 0, [], "the next element of the array continues"),
        (75, 0, (4, 4), 75, [], "submit the job again to continue"),
        (2, 0, (2, 4), 2, ["scancel --state=PENDING 6"], "failed with status 2"),
    ]
    element = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_JOB_ID")
    jobs = [
        (
            {
                "srun": SRUN,
                "pmm3d": f'echo "$*" >&2; exit {status}',
                "scontrol": f"{LOG}; exit {refuses}",
                "scancel": LOG,
            },
            dict(zip(element, (*array, 6))) if array else {},
        )
        for status, refuses, array, *_ in cases
    ]
    for case, (done, log) in zip(cases, trainings(tmp_path, jobs)):
        status, refuses, array, code, called, text = case
        with given(status=status, refuses=refuses, array=array):
            assert done.returncode == code and text in done.stderr, done.stderr
            assert "train a.toml --resume auto" in done.stderr and log == called


def test_the_signal_before_the_limit_goes_to_the_ranks(tmp_path):
    """143: the ranks did not handle SIGTERM yet. 0: they had reached the end."""
    cases = [(75, 0, True), (143, 0, True), (137, 137, False), (0, 0, False)]
    signal = 'read -r _ _ _ parent _ </proc/$PPID/stat; kill -USR1 "$parent"; '
    programs = {"srun": SRUN, "scontrol": LOG, "scancel": LOG, "squeue": "echo 7.0"}
    jobs = [(programs | {"pmm3d": f"{signal}{UNTIL % 'log'}exit {status}"}, {}) for status, *_ in cases]
    for (status, code, requeued), (done, log) in zip(cases, trainings(tmp_path, jobs)):
        with given(status=status):
            assert log == ["scancel --signal=TERM 7.0", *["scontrol requeue 7"] * requeued], done.stderr
            assert done.returncode == code and "the time limit is near: asking for a checkpoint" in done.stderr


def test_a_signal_before_the_ranks_have_begun_waits_for_them(tmp_path):
    """The ranks begin after the first squeue, and end after the signal; or they never begin."""
    signal = 'read -r _ _ _ parent _ </proc/$$/stat; kill -USR1 "$parent"; '
    begins = f'{UNTIL % "asked"}: > "$SLURM_SUBMIT_DIR/began"; {UNTIL % "log"}exit 75'
    squeue = ': > "$SLURM_SUBMIT_DIR/asked"; [ ! -e "$SLURM_SUBMIT_DIR/began" ] || echo 7.0'
    programs = {"scancel": LOG, "pmm3d": "", "squeue": squeue}
    ends = trainings(tmp_path, [(programs | {"srun": signal + srun}, {}) for srun in (begins, "exit 1")])
    assert [log for _, log in ends] == [["scancel --signal=TERM 7.0"], []]
    for done, _ in ends:
        assert "asking for a checkpoint" in done.stderr and "failed with status" in done.stderr


def test_train_without_a_configuration_says_so(tmp_path):
    [done] = bash(tmp_path, [Row((JOBS / "train.sbatch",), {"SLURM_JOB_ID": 7, "SLURM_SUBMIT_DIR": ROOT})])
    assert done.returncode == 2 and "name the configuration" in done.stderr


def test_a_requeued_training_without_a_checkpoint_is_an_error_on_every_rank(on_ranks, tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.ones((40, 3), "float32"), np.arange(40) % 2
    config = tmp_path / "a.toml"
    config.write_text(
        f'[data]\nfile = "{tmp_path}/data.h5"\nbatch_size = 8\n[network]\nhidden = [4]\n'
        f'[training]\nfolder = "{tmp_path}/run"\nepochs = 1\n'
    )

    def train(restarts):
        return on_ranks(2, "train", config, "--resume", "auto", env={"SLURM_RESTART_COUNT": restarts})

    done = train("1")
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if "Error" in line]
    assert len(said) == 1 and "CheckpointError: this job was requeued (restart 1)" in said[0]
    assert f"{tmp_path}/run/checkpoints" in said[0] and "Submit a new job" in said[0]
    assert not (tmp_path / "run/metrics.jsonl").exists() and not list((tmp_path / "run").glob("checkpoints/step-*"))
    assert train("0").returncode == train("2").returncode == 0


@pytest.fixture
def scaling(monkeypatch, capsys):
    """scaling(folder): (exit code, output, errors) of the program."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["scaling.py", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "jobs/scaling.py"), run_name="__main__")
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_scaling_is_shown_beside_the_limit_and_the_fewest_ranks(scaling, tmp_path):
    for kind, ranks, gflops in (("strong", 8, 300.0), ("strong", 4, 200.0), ("weak", 4, 200.0), ("weak", 8, 380.0)):
        sizes = {"m": 96, "n": 97, "k": 98, "ranks": ranks, "grid": [1, 2, ranks // 2], "seconds": [0.3, 0.1, 0.2]}
        rates = {"gflops": gflops, "ratio": gflops / ranks / 60, "verified": True}
        result = sizes | rates | {"environment": {"hosts": ["a"] * (ranks // 4)}}
        (tmp_path / f"{kind}-{ranks:05}.json").write_text(json.dumps([result] if kind == "weak" else result))
    code, said, errors = scaling(tmp_path, "--plot", tmp_path / "a.png")
    assert code == 0, errors
    rows = [line.strip("│ ").split("│") for line in said.splitlines() if "96, 97, 98" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["strong", "4", "1", "96, 97, 98", "1x2x2", "200.00", "200.0", "0.833", "1.000", "yes"],
        ["strong", "8", "2", "96, 97, 98", "1x2x4", "200.00", "300.0", "0.625", "0.750", "yes"],
        ["weak", "4", "1", "96, 97, 98", "1x2x2", "200.00", "200.0", "0.833", "1.000", "yes"],
        ["weak", "8", "2", "96, 97, 98", "1x2x4", "200.00", "380.0", "0.792", "0.950", "yes"],
    ]
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"
    (tmp_path / "weak-00016.json").write_text('{"m": 9')
    code, said, errors = scaling(tmp_path)
    assert code == 1 and "weak-00016.json is not a result of pmm3d bench" in errors and said.count("96, 97, 98") == 4


def test_no_figures_of_scaling(scaling, tmp_path):
    code, _, errors = scaling(tmp_path)
    assert code == 2 and "contains no figures of jobs/scaling.sbatch" in errors
