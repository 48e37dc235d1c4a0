"""The linters of the package managers and of the services, on the files that they read."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from loops import given

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "packaging"
PACKAGES = "py-rattler-build easybuild pycodestyle zizmor check-jsonschema validate-pyproject vermin ruff".split()
pytestmark = pytest.mark.thorough("installs linters from PyPI")

CONDA = """
import sys
from rattler_build import Stage0Recipe, VariantConfig
for rendered in Stage0Recipe.from_file(sys.argv[1]).render(VariantConfig({"python_min": ["3.10"]})):
    print(rendered.recipe.package.name)
"""
EASYBUILD = """
import sys
from pathlib import Path
from easybuild.framework.easyconfig.parser import EasyConfigParser
from easybuild.framework.easyconfig.style import check_easyconfigs_style
from easybuild.tools.options import set_up_configuration
set_up_configuration(args=["--allow-use-as-root-and-accept-consequences"], silent=True)
config = EasyConfigParser(sys.argv[1]).get_config_dict()
assert check_easyconfigs_style(sys.argv[1:]) == 0
files = [path.name for path in Path(sys.prefix, "easybuild", "easyconfigs").glob("*/*/*.eb")]
for name, version in config["dependencies"]:
    of_toolchain = [file for file in files if file.startswith(f"{name}-{version}-")
                    and file.endswith(("-GCCcore-14.3.0.eb", "-gfbf-2025b.eb", "-gompi-2025b.eb", "-foss-2025b.eb"))]
    assert of_toolchain, (name, version)
"""
SPACK = """
line-length = 99
[lint]
select = ["E", "F", "I", "W"]
ignore = ["E731", "F403", "F405", "F811"] # the star import gives the names of Spack
[lint.isort]
split-on-trailing-comma = false
section-order = ["future", "standard-library", "third-party", "spack", "first-party", "local-folder"]
sections = { spack = ["spack"] }
"""


@pytest.fixture(scope="module")
def linters(tmp_path_factory):
    """The programs of an environment with all linters."""
    folder = tmp_path_factory.mktemp("linters")
    venv.create(folder / "environment", symlinks=True)
    programs = folder / "environment" / "bin"
    pip = sys.executable, "-m", "pip", "--python", programs / "python"
    subprocess.run([*pip, "install", "-q", *PACKAGES], check=True)
    return programs


def passes(linters, program, *arguments):
    environ = {**os.environ, "PATH": f"{linters}{os.pathsep}{os.environ['PATH']}", "EASYBUILD_PREFIX": str(linters)}
    done = subprocess.run([linters / program, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rattler_build_renders_the_conda_recipe(linters):
    assert passes(linters, "python", "-c", CONDA, RECIPES / "conda" / "recipe.yaml").split() == ["pmm3d-core", "pmm3d"]


def test_easybuild_accepts_the_style_and_has_the_dependencies(linters):
    passes(linters, "python", "-c", EASYBUILD, *(RECIPES / "easybuild").glob("*.eb"))


def test_the_spack_package_has_the_style_of_spack(linters, tmp_path):
    """Spack itself is on no registry. These are the rules of its repository of packages."""
    (tmp_path / "ruff.toml").write_text(SPACK)
    for command in (["check"], ["format", "--check"]):
        passes(linters, "ruff", *command, "--no-cache", "--config", tmp_path / "ruff.toml", RECIPES / "spack")


def test_files_of_services_fit_their_schemas(linters):
    for schema, file in (
        ("github-workflows", ".github/workflows/ci.yml"),
        ("readthedocs", ".readthedocs.yaml"),
        ("citation-file-format", "CITATION.cff"),
    ):
        with given(file=file):
            passes(linters, "check-jsonschema", "--builtin-schema", f"vendor.{schema}", file)
    passes(linters, "zizmor", "--offline", "--no-progress", ".github")
    passes(linters, "validate-pyproject", "pyproject.toml")


def test_no_module_needs_a_newer_python_than_pyproject_says(linters):
    """Nor a newer name of the standard library. vermin confuses `decode` of a module with str.decode of Python 2."""
    passes(linters, "vermin", "-q", "-t=3.10-", "--violations", "--no-tips", "--exclude", "str.decode", "pmm3d")
