"""Recipes, the workflow and the version: they agree with pyproject.toml, .ci/run and the Makefile."""

import hashlib
import importlib.util
import re
import shutil
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from loops import given
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import pmm3d

ROOT = Path(__file__).parents[2]
tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPES = ROOT / "packaging"
CONDA, SPACK = "conda/recipe.yaml", "spack/packages/py_pmm3d/package.py"


def needs(*extras):
    """The lower bound of each package that pmm3d with these extras needs."""
    found = {}
    lists = [PROJECT["optional-dependencies"][extra] for extra in extras] or [PROJECT["dependencies"]]
    for need in (Requirement(text) for texts in lists for text in texts):
        if need.name == "pmm3d":
            found |= needs(*need.extras)
        else:
            [bound] = need.specifier
            assert bound.operator == ">="
            found[need.name] = bound.version
    return found


def test_the_version_is_the_same_everywhere():
    version = PROJECT["version"]
    assert pmm3d.__version__ == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGES.md").read_text(), re.M)[1] == version
    assert conda()["context"]["version"] == version
    assert f'\n    version("{version}", ' in (RECIPES / SPACK).read_text()
    assert easyconfig()["version"] == version


def conda():
    return yaml.safe_load((RECIPES / CONDA).read_text())


OF_CONDA = {
    "matplotlib": "matplotlib-base",
    "prometheus-client": "prometheus_client",
    "torch": "pytorch",
    "cupy-cuda13x": "cupy",
}


def for_conda(bounds):
    return {f"{OF_CONDA.get(name, name)} >={version}" for name, version in bounds.items()}


def test_conda_packages_need_what_pyproject_says():
    core, whole = conda()["outputs"]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {need.replace(" ", "") for need in core["requirements"]["host"][2:]} == set(build)
    assert set(core["requirements"]["run"]) == for_conda(needs()) | {"python >=${{ python_min }}", "__linux"}
    optional = needs("torch", "cupy", "embed")
    assert set(core["requirements"]["run_constraints"]) == for_conda(
        {name: optional[name] for name in ("torch", "cupy-cuda13x", "cffi")}
    )
    assert set(whole["requirements"]["run"][1:]) == for_conda(needs("all"))
    [command] = PROJECT["scripts"].items()
    assert core["build"]["python"]["entry_points"] == [" = ".join(command)]


def spack(monkeypatch):
    """The variants of the Spack package, and its dependencies: {(package, condition): bound}."""
    conditions, variants, dependencies = [""], [], {}

    @contextmanager
    def when(condition):
        conditions.append(condition)
        yield
        conditions.pop()

    def depends_on(spec, when="", type=None):
        name, _, bound = spec.partition("@")
        dependencies[name, conditions[-1] or when] = bound

    module = ModuleType("spack.package")
    vars(module).update(when=when, depends_on=depends_on, variant=lambda name, **_: variants.append(name))
    vars(module).update(dict.fromkeys(("license", "version", "conflicts", "requires"), lambda *_, **__: None))
    monkeypatch.setitem(sys.modules, "spack", ModuleType("spack"))
    monkeypatch.setitem(sys.modules, "spack.package", module)
    for name, base in (("cuda", "CudaPackage"), ("python", "PythonPackage")):
        system = ModuleType(name)
        setattr(system, base, type(base, (), {"cuda_arch_values": ("90",)}))
        monkeypatch.setitem(sys.modules, f"spack_repo.builtin.build_systems.{name}", system)
    exec((RECIPES / SPACK).read_text(), {"__name__": "package"})
    return variants, dependencies


def test_the_spack_package_needs_what_pyproject_says(monkeypatch):
    variants, dependencies = spack(monkeypatch)
    assert set(variants) == {"io", "cli", "train", "report", "text", "monitor", "torch"}
    assert dependencies.pop(("python", "")) == PROJECT["requires-python"].removeprefix(">=") + ":"
    for extra in ("", *variants):
        with given(extra=extra):
            found = {
                name.removeprefix("py-"): bound
                for (name, condition), bound in dependencies.items()
                if condition == (f"+{extra}" if extra else "")
            }
            own = dict(needs(extra) if extra else needs())
            if extra == "train":  # the variant requires io and cli
                own = {name: own[name] for name in own if name not in needs("io", "cli")}
            if not extra:
                assert found.pop("setuptools") == "77:"
                assert dependencies["py-tomli", "^python@:3.10"] == f"{own.pop('tomli')}:"
            assert found == {name: f"{version}:" for name, version in own.items()}
    assert dependencies["py-cupy", "+cuda"] == f"{needs('cupy')['cupy-cuda13x']}:"


def easyconfig():
    [path] = (RECIPES / "easybuild").glob("pmm3d-*.eb")
    found = {"SOURCE_PY3_WHL": ""}
    exec(path.read_text(), found)
    assert path.name == "pmm3d-{version}-{toolchain[name]}-{toolchain[version]}.eb".format(**found)
    return found


BUNDLED = {
    "numpy": "SciPy-bundle",
    "scipy": "SciPy-bundle",
    **dict.fromkeys(("rich", "threadpoolctl", "tomlkit", "jinja2"), "Python-bundle-PyPI"),
}


def test_the_easyconfig_has_the_product_and_training():
    """For this toolchain, EasyBuild has no tokenizers, and no torch of a sufficient version."""
    config = easyconfig()
    lists = config["dependencies"] + config["exts_list"]
    found = {name.lower().replace("_", "-"): version for name, version, *_ in lists}
    assert found.pop("pmm3d") == PROJECT["version"]
    assert SpecifierSet(PROJECT["requires-python"]).contains(found.pop("python"))
    wanted = needs() | needs("train", "report")
    del wanted["tomli"]  # for Python 3.10
    for name, bound in wanted.items():
        with given(name=name):
            assert BUNDLED.get(name, name).lower() in found
            assert name in BUNDLED or SpecifierSet(f">={bound}").contains(found[name])
    assert set(found) == {BUNDLED.get(name, name).lower() for name in wanted}


def test_checksums_are_written_into_every_recipe(tmp_path):
    """The version and the checksum of an sdist change, and nothing else."""
    spec = importlib.util.spec_from_file_location("checksums", RECIPES / "checksums.py")
    checksums = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checksums)
    shutil.copytree(RECIPES, tmp_path / "recipes")
    sdist = tmp_path / "pmm3d-9.8.7.tar.gz"
    sdist.write_bytes(b"a release")
    checksums.update(sdist, tmp_path / "recipes")
    changed = {path for path in (tmp_path / "recipes").rglob("*") if path.suffix in (".yaml", ".py", ".eb")}
    assert len(changed) == 5 and any("pmm3d-9.8.7-" in path.name for path in changed)
    others = {path for path in changed if path.name == "checksums.py" or path.parent.name == "py_array_api_compat"}
    assert all(path.read_bytes() == (RECIPES / path.relative_to(tmp_path / "recipes")).read_bytes() for path in others)
    for path in changed - others:
        with given(path=path.name):
            text = path.read_text()
            before = RECIPES / str(path.relative_to(tmp_path / "recipes")).replace("9.8.7", PROJECT["version"])
            checksum = hashlib.sha256(b"a release").hexdigest()
            expected = before.read_text().replace(PROJECT["version"], "9.8.7").replace("0" * 64, checksum)
            assert text == expected and text.count(checksum) == 1
    with pytest.raises(SystemExit, match="pmm3d-X.Y.Z.tar.gz"):
        checksums.update(tmp_path / "other-9.8.7.tar.gz", tmp_path / "recipes")


def workflow():
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def commands(job):
    return [step["run"] for step in job["steps"] if step.get("run", "").startswith("make ")]


def test_the_workflow_runs_the_commands_of_the_makefile():
    flow = workflow()
    jobs = flow["jobs"]
    script = (ROOT / ".ci" / "run").read_text()
    own = re.findall(r"^(?:exec )?(make .*)$", script, re.M)
    assert commands(jobs["tests"]) + ["make docs"] == own and commands(jobs["build"]) == [
        "make lint",
        "make docs",
        "make dist",
    ]
    assert "export PMM3D_CI=1\n" in script and flow["env"] == {"PMM3D_CI": "1"}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert all(command.split()[1] in targets for job in jobs.values() for command in commands(job))
    matrix = jobs["tests"]["strategy"]["matrix"]
    pythons = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert matrix["python"] == pythons and f">={pythons[0]}" == PROJECT["requires-python"]
    assert matrix["mpi"] == ["openmpi", "mpich"] and jobs["tests"]["env"] == {"MPI": "${{ matrix.mpi }}"}


def test_a_release_follows_the_tests_and_holds_no_token():
    release = workflow()["jobs"]["release"]
    assert release["needs"] == ["tests", "build"] and release["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert release["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
