"""`make setup` with small locks and local indexes: the source of torch's CPU build."""

import os
import subprocess
import zipfile
from pathlib import Path
from shutil import copy

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH, OTHER = "torch==2.13.0+cpu", "plain==1.0"


def make_wheel(folder: Path, requirement: str) -> Path:
    """Make the smallest wheel that pip installs."""
    name, version = requirement.split("==")
    folder.mkdir(parents=True, exist_ok=True)
    file, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(
            f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return file


def make_index(folder: Path, *requirements: str) -> str:
    """Make a package index as a folder of pages like PyPI's, and return its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    for requirement in requirements:
        page = folder / requirement.split("==")[0]
        file = make_wheel(page, requirement)
        (page / "index.html").write_text(f'<a href="{file.name.replace("+", "%2B")}">{file.name}</a>')
    return folder.as_uri()


class Setup:
    """A folder with the Makefile and a lock of two packages. pip only knows an index with PyPI's
    content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        self.environment = self.folder / ".venv"
        (self.folder / "requirements").mkdir(parents=True)
        (self.folder / "requirements" / "cpu.txt").write_text(f"{OTHER}\n{TORCH}\n")
        copy(ROOT / "Makefile", self.folder)
        self.pypi = make_index(folder / "pypi", OTHER, "torch==2.13.0")
        self.variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))
        }
        self.variables |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": self.pypi}

    def make(self, torch_index: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["make", ".venv/.requirements-installed", f"TORCH_INDEX={torch_index}"]
        environment = self.variables | variables
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def installed(self) -> set[str]:
        python = self.environment / "bin" / "python"
        code = "import plain, torch; print(plain.version, torch.version)"
        return set(
            subprocess.run(
                [python, "-c", code], text=True, capture_output=True, check=True
            ).stdout.split()
        )


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


@pytest.mark.thorough
def test_setup_asks_the_index_of_pytorch_where_pip_has_no_cpu_build(setup: Setup, tmp_path: Path):
    done = setup.make(make_index(tmp_path / "pytorch", TORCH))
    assert done.returncode == 0, done.stdout
    assert setup.installed() == {"1.0", "2.13.0+cpu"}
    assert f"does not find {TORCH}" in done.stdout and "ERROR" not in done.stdout


@pytest.mark.thorough
def test_setup_leaves_the_index_of_pytorch_alone_where_pip_has_the_build(setup: Setup, tmp_path: Path):
    make_wheel(tmp_path / "wheels", TORCH)
    done = setup.make("file:///nowhere", PIP_FIND_LINKS=str(tmp_path / "wheels"))
    assert done.returncode == 0, done.stdout
    assert setup.installed() == {"1.0", "2.13.0+cpu"}
    assert "nowhere" not in done.stdout


@pytest.mark.thorough
def test_setup_gives_advice_if_the_build_is_missing_and_installs_nothing_else(
    setup: Setup, tmp_path: Path
):
    empty = make_index(tmp_path / "empty")
    done = setup.make(empty)
    assert done.returncode == 2
    last = [line for line in done.stdout.splitlines() if line.startswith("weft:")][-1]
    assert f"pip finds no {TORCH} at {empty} either" in last
    assert "make setup TORCH_INDEX=URL" in last and "PIP_FIND_LINKS=FOLDER make setup" in last
    assert not list(setup.environment.glob("lib/*/site-packages/plain*"))
    assert not (setup.environment / ".requirements-installed").exists()


@pytest.mark.thorough
def test_setup_does_not_try_again_where_pip_fails_for_another_reason(setup: Setup, tmp_path: Path):
    make_wheel(tmp_path / "wheels", TORCH).write_bytes(b"this is no wheel")
    done = setup.make(make_index(tmp_path / "pytorch", TORCH), PIP_FIND_LINKS=str(tmp_path / "wheels"))
    assert done.returncode == 2
    assert "does not find" not in done.stdout and "torch" in done.stdout


def test_every_build_that_pypi_lacks_is_one_of_pytorch():
    locks = [file.read_text().splitlines() for file in (ROOT / "requirements").glob("*.txt")]
    builds = {
        line
        for lock in locks
        for line in lock
        if "==" in line and "+" in line and not line.startswith("#")
    }
    assert builds == {TORCH}
