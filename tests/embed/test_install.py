"""`make install`: libraries that need no clone."""

import os
import shutil
import subprocess

import pytest
from callers import FOREIGN, ROOT, Caller

pytestmark = pytest.mark.thorough("an environment of its own")


def flags(prefix, *names):
    environ = os.environ | {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    command = ["pkg-config", "--cflags", "--libs", *names]
    return subprocess.run(command, env=environ, text=True, capture_output=True, check=True).stdout.split()


def test_what_is_installed_over_an_older_version_runs_without_the_clone(tmp_path):
    """Compiled with pkg-config, in any folder. The linker keeps a drop-in of which the program needs no symbol."""
    clone, prefix = tmp_path / "clone", tmp_path / "prefix"
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).rstrip("\0").split("\0"):
        if not name.startswith(("docs/", "tests/")):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    older = prefix / "lib" / "libpmm3d.so.0.0.9", prefix / "lib" / "pmm3d" / "bin" / "pip"
    interrupted = prefix / "lib" / "pmm3d.old" / "bin" / "pip"  # left by an install that was interrupted
    for path in (*older, interrupted):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)
    command = ["make", "install", f"PREFIX={prefix}", "MPICC=mpicc.openmpi"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith((*FOREIGN, "MAKE", "MFLAGS"))}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, ROOT.glob(".venv-embed/lib/python*/site-packages")))
    done = subprocess.run(command, cwd=clone, env=environ, text=True, capture_output=True)
    assert done.returncode == 0 and not older[0].exists(), done.stdout + done.stderr
    assert not interrupted.parents[1].exists()
    command[-1] = "MPICC=false"
    assert subprocess.run(command, cwd=clone, env=environ, capture_output=True).returncode != 0  # nothing is replaced
    shutil.rmtree(clone)

    program = tmp_path / "product"
    linked = [*flags(prefix, "pmm3d", "pmm3d_scalapack"), "-lscalapack-openmpi", "-lm"]
    source = ROOT / "apps" / "embed" / "product.c"
    subprocess.run(["mpicc.openmpi", "-Wl,--as-needed", source, *linked, "-o", program], cwd=tmp_path, check=True)
    needed = subprocess.check_output(["readelf", "-d", program], text=True)
    version = (ROOT / "CITATION.cff").read_text().partition("\nversion: ")[2].split()[0]
    for name in ("pmm3d", "pmm3d_scalapack"):
        assert f"[lib{name}.so.{version.partition('.')[0]}" in needed, needed
        assert (prefix / "lib" / f"lib{name}.so").resolve().name == f"lib{name}.so.{version}"
    assert Caller(program)(2).stdout.endswith(": right\n")
