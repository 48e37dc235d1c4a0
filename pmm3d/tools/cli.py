"""The command `pmm3d`. Run it under mpiexec or srun; rank 0 speaks for all."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..model import machine
from ..model.environment import task_rank
from .convert import convert_command
from .doctor.command import doctor_command

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
    help="Distributed matrix products by the 3D algorithm, and networks trained with them. Run under mpiexec or srun: "
         "python -m pmm3d.launcher -n 8 -m pmm3d bench",
)

FIRST_RANK_SPEAKS = 1.0
LAST_RESORT_SECONDS = 60
NOT_FINISHED = 75
"""Exit code of a run that a signal ended: EX_TEMPFAIL of sysexits.h, try again later."""
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def main() -> None:
    """Sets the BLAS environment before anything loads numpy, and lets the first rank alone explain usage: the others
    are silent, and end later, since mpiexec ends all ranks when one fails."""
    machine.set_blas_environment()
    first = task_rank(os.environ) == 0
    if not first:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        app()
    except SystemExit:
        if "mpi4py.MPI" in sys.modules:
            _leave()
        elif not first:
            time.sleep(FIRST_RANK_SPEAKS)
        raise


def _leave() -> None:
    """All together: MPI_Finalize would wait in silence, and for ever, for a rank that does not come. And each with its
    own exit code: a launcher that ends all ranks when the first one has failed sends SIGTERM, which is too late."""
    from mpi4py import MPI

    from ..comm.communicator import all_leave

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    all_leave(MPI.COMM_WORLD, _time_limit())
    faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True)
    MPI.Finalize()
    faulthandler.cancel_dump_traceback_later()


@app.callback()
def _pmm3d() -> None:
    """Commands take the same options on all ranks."""


def _one_of(*choices: str):
    def check(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(choices)}")
        return value

    return check


@app.command()
def bench(
    m: Annotated[int, typer.Option(min=0, help="Rows of A and C.")] = 4096,
    n: Annotated[int, typer.Option(min=0, help="Columns of B and C.")] = 4096,
    k: Annotated[int, typer.Option(min=0, help="Columns of A, rows of B.")] = 4096,
    grid: Annotated[str, typer.Option(help="auto: least modelled time; GxxGyxGz, as in 2x2x2; all: every grid of "
                                           "this many ranks, compared.")] = "auto",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".", callback=_one_of(*DTYPES))] = "float64",
    array: Annotated[str, typer.Option(help="Whose arrays: numpy, torch, torch:DEVICE or cupy.")] = "numpy",
    transpose: Annotated[str, typer.Option(help="How A and B are stored, as in BLAS: nn, tn (A transposed), nt, tt.",
                                           callback=_one_of("nn", "tn", "nt", "tt"))] = "nn",
    repeat: Annotated[int, typer.Option(min=1, help="Timed products; the median counts.")] = 7,
    verify: Annotated[str, typer.Option(help="auto: Freivalds' check, and an exact comparison when small; freivalds; "
                                             "exact; none.",
                                        callback=_one_of("auto", "freivalds", "exact", "none"))] = "auto",
    panels: Annotated[int | None, typer.Option(min=1, help="Panels, so that communication runs under the GEMM. "
                                                              "Left out: 1 on one node, 4 across nodes.")] = None,
    max_workspace: Annotated[int | None, typer.Option(min=0, help="Bytes of work arrays a rank may use.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures here; a list for --grid all.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time per phase here (.png, .pdf, .svg).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the run here (ui.perfetto.dev).")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a collective that hangs is reported "
                                                          "(600).")] = None,
) -> None:
    """Time C = A B on all ranks, verify it, and say how far from the limit it is.

    The limit is the ranks' cores times the rate of the same BLAS on one core, measured in the same run with a product
    of the same proportions. Bytes that each axis moved stand beside the model's and the lower bound for any algorithm.

    [bold]Examples[/]

    pmm3d bench                                        4096 cubed, float64

    pmm3d bench --m 65536 --n 512 --k 512 --dtype float32

    pmm3d bench --grid all --plot grids.png            which grid is the fastest here?
    """
    sys.stderr = sys.__stderr__
    comm = _world()
    from ..errors import Pmm3dError
    from ..model import ranking
    from .bench import tables as report
    from .bench.measure import Case, run

    case = Case(m, n, k, dtype, array, transpose, repeat, verify, panels, max_workspace)
    shapes = [shape[:3] for shape in ranking.ranked_grids((m, n, k), comm.size, dtype)] if grid == "all" else [grid]
    try:
        _on_first(comm, lambda: _writable(json, plot, trace))
        results = _run_all(run, case, comm, shapes, trace, timeout)
    except Exception as error:
        if not isinstance(error, Pmm3dError) and not getattr(error, "everywhere", False):
            raise
        _fail(comm, error)
    if comm.rank == 0:
        console = _console(sys.stdout)
        if len(results) == 1:
            report.print_result(results[0], console)
        else:
            report.print_sweep(results, console)
        if json:
            report.write_json(results, str(json))
        if plot:
            report.plot(results, str(plot))
        for written in filter(None, (json, plot, trace)):
            console.print(f"wrote {written}")
    if verify != "none" and not all(result.verified for result in results):
        raise typer.Exit(1)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="TOML file; apps/digits.toml is one, with every section.")],
    resume: Annotated[str, typer.Option(help="auto: from the newest good checkpoint of training.folder, if there is "
                                             "one; never: from the start, if there is none; or the path of a "
                                             "checkpoint.")] = "never",
    show: Annotated[bool, typer.Option("--show", help="Print the configuration with defaults; do nothing.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the run here (ui.perfetto.dev).")] = None,
) -> None:
    """Train a fully connected network on data in HDF5, as a configuration says.

    Writes metrics.jsonl, run.json, curves.png and checkpoints/ into training.folder, which belongs to this job until it
    ends: another one refuses. `pmm3d report` makes a page of them. Batches, weights and checkpoints do not depend on
    the grid: a run may be resumed on another number of ranks. SIGUSR1 has a checkpoint written, SIGTERM has
    one written and ends the run with exit code 75: not finished, start again with --resume auto.

    [bold]Examples[/]

    python -m pmm3d.launcher -n 8 -m pmm3d train apps/digits.toml

    srun -n 64 pmm3d train surrogate.toml --resume auto

    pmm3d train x.toml --show                          every key with its default
    """
    sys.stderr = sys.__stderr__
    comm = _world()
    from ..errors import Pmm3dError
    from ..nn.training import config as configuration
    from ..nn.training.job import train_job

    try:
        loaded = _on_first(comm, lambda: configuration.load(config))
        if show:
            if comm.rank == 0:
                print(loaded.model_dump_json(indent=2))
            return
        finished = train_job(loaded, comm, resume, trace)
    except Exception as error:
        if not isinstance(error, Pmm3dError) and not getattr(error, "everywhere", False):
            raise
        _fail(comm, error)
    if not finished:
        raise typer.Exit(NOT_FINISHED)


app.command("convert")(convert_command)
app.command("doctor")(doctor_command)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a training run, or a file of pmm3d bench --json.")],
    output: Annotated[Path | None, typer.Option(help="The page to write; report.html in the folder if left "
                                                     "out.")] = None,
) -> None:
    """Make a page of a run: curves, time of each rank, bytes beside the model, memory, the grid.

    One HTML file that needs no network, readable while the run goes on too. No MPI is used.

    [bold]Example[/]

    pmm3d report runs/digits
    """
    from ..errors import Pmm3dError
    from .page import write_page

    if task_rank(os.environ):
        return
    try:
        print(f"wrote {write_page(run, output)}")
    except Pmm3dError as error:
        print(f"pmm3d: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(2) from None


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's, whose newest one is taken.")],
    target: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
) -> None:
    """Write the weights of a checkpoint as a torch state dict, in a safetensors file.

    [bold]Example[/]

    pmm3d export runs/digits digits.safetensors

    and in torch: net.load_state_dict(safetensors.torch.load_file("digits.safetensors")), where net is an nn.Sequential
    of the same layers.
    """
    sys.stderr = sys.__stderr__
    comm = _world()
    from ..errors import Pmm3dError
    from ..nn.exchange import export_checkpoint

    try:
        export_checkpoint(comm, checkpoint, target)
    except Pmm3dError as error:
        _fail(comm, error)
    if comm.rank == 0:
        print(f"wrote {target}")


def _run_all(run, case, comm, shapes, trace, timeout):
    """The results of the case on each grid, with a progress bar on rank 0 that is drawn between products only."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[stage]}"),
                        TimeElapsedColumn(), console=_console(sys.stderr), auto_refresh=False, transient=True,
                        disable=comm.rank != 0)
    stages = case.repeat + 4
    results = []
    with progress:
        bar = progress.add_task("benchmark", total=stages * len(shapes), stage="")
        for shape in shapes:

            def tell(stage: str) -> None:
                progress.update(bar, advance=1, stage=stage)
                progress.refresh()

            results.append(run(case, comm, shape, tell=tell, trace=trace and str(trace), timeout=timeout))
    return results


def _console(stream):
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    size = {"width": int(columns), "height": 50} if columns.isdecimal() else {}
    return Console(file=stream, highlight=False, **size)


def _world():
    """MPI's ranks."""
    with _no_hang():
        from mpi4py import MPI
    return MPI.COMM_WORLD


def _time_limit() -> float:
    """Seconds of PMM3D_TIMEOUT; 0 if it makes no sense, of which the grid tells."""
    from ..errors import Pmm3dError
    from ..model.environment import Settings

    try:
        return Settings().timeout
    except Pmm3dError:
        return 0.0


@contextmanager
def _no_hang():
    """Before there is a grid with a watchdog: a rank that is still here after PMM3D_TIMEOUT ends, with its stack."""
    if seconds := _time_limit():
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _on_first(comm, work):
    """What rank 0 makes of the file system, on every rank; its Pmm3dError too. One rank reads instead of thousands."""
    from ..errors import Pmm3dError

    result = error = None
    if comm.rank == 0:
        try:
            result = work()
        except Pmm3dError as raised:
            error = raised
    with _no_hang():
        result, error = comm.bcast((result, error))
    if error is not None:
        raise error
    return result


def _writable(*paths) -> None:
    from ..errors import Pmm3dError

    for path in filter(None, paths):
        folder = path.resolve().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
            raise Pmm3dError(f"cannot write {path}: {folder} is not a folder that can be written")


def _fail(comm, error) -> None:
    """The same error on all ranks is said once; that of one rank alone ends the job."""
    from ..comm.ending import all_come
    from ..comm.watch import abort_job

    said = f"pmm3d: {type(error).__name__}: {error}"
    if not all_come(comm):
        abort_job(comm, f"{said} (on rank {comm.rank})", 2)
    if comm.rank == 0:
        print(said, file=sys.stderr, flush=True)
    raise typer.Exit(2)
