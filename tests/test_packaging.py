"""What the wheel holds, what an import brings in, and that the pinned set matches the metadata."""

import configparser
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.helpers import ROOT, run_python


@pytest.fixture(scope="module")
def metadata():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(tmp_path, metadata):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    result = subprocess.run([*build, source], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"osa_jax-{metadata['metadata']['version']}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if ".dist-info/" not in name}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "osa_jax").rglob("*.py")}
    assert package == ours | {"osa_jax/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    info = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(info).decode()
    core = re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", text, re.M)
    assert sorted(core) == ["jax", "numpy"]
    assert re.findall(r"^Provides-Extra: (\w+)$", text, re.M) == [
        *("train", "tensorboard", "tfds", "test", "cuda", "tpu")
    ]


def test_importing_the_package_brings_in_neither_flax_nor_a_data_set():
    code = "import sys, osa_jax; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "osa_jax" in loaded
    assert not loaded & {"flax", "optax", "sklearn", "tensorflow_datasets", "matplotlib", "absl"}


def test_every_requirement_is_pinned_and_meets_its_lower_bound(metadata):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {normalised(name): version for name, version in pins.items()}
    groups = [metadata["options"]["install_requires"], *metadata["options.extras_require"].values()]
    for requirement in "\n".join(groups).split():
        if "[" in requirement:
            continue
        name, least = requirement.split(">=")
        assert numbers(pins[normalised(name)]) >= numbers(least), requirement


def normalised(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def numbers(version):
    return tuple(int(part) for part in version.split("."))


def test_pyproject_leaves_the_metadata_to_setup_cfg():
    tables = re.findall(r"^\[([\w.-]+)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    assert all(table == "build-system" or table.startswith("tool.ruff") for table in tables)
