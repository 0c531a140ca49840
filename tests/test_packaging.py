import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import maxsoftmax
import pytest


def files(folder):
    """Returns the files below a folder that are sources."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".mojoc"))
    return {path.relative_to(folder).as_posix() for path in paths}


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory):
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, root]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


def test_a_wheel_holds_every_source_and_nothing_else(wheel, root):
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in names if ".dist-info/" in name}
    python = {f"maxsoftmax/{name}" for name in files(root / "python" / "maxsoftmax")}
    mojo = {f"maxsoftmax/op/{name}" for name in files(root / "op")}
    assert names - about == python | mojo
    assert "maxsoftmax/op/maxsoftmax_native/softmax.mojo" in names
    assert any(name.endswith("licenses/LICENSE") for name in about)


def test_the_version_is_in_one_place(wheel, root):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = message_from_bytes(archive.read(metadata))
    assert found["Version"] == maxsoftmax.__version__
    assert dict(url.split(", ") for url in found.get_all("Project-URL"))
    # Not one that a release would have to change as well, but for the recipe, which says what it is of.
    for name in ("pyproject.toml", "pixi.toml", "CITATION.cff"):
        assert not re.search(r"^version\b", (root / name).read_text(), re.M), name


@pytest.fixture(scope="module")
def recipe(root):
    rattler_build = pytest.importorskip("rattler_build")
    # Raises for what is not of the recipe's schema.
    (variant,) = rattler_build.Stage0Recipe.from_file(root / "recipe" / "recipe.yaml").render()
    return variant.recipe.to_dict()


def test_the_recipe_is_of_this_version(recipe):
    assert recipe["package"] == {"name": "maxsoftmax", "version": maxsoftmax.__version__}


def test_the_recipe_needs_what_the_package_needs(recipe, root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = [
        re.sub(r"^([\w-]+?)==", r"\1", re.sub(r"(>=|==)", r" \1", line, count=1)) for line in project["dependencies"]
    ]
    needed = [line.replace("max ==", "modular ") for line in needed]
    python, *others = recipe["requirements"]["run"]
    assert others == needed
    assert python.startswith(f"python {project['requires-python']}")
    assert recipe["build"]["python"]["entry_points"] == [f"{a} = {b}" for a, b in project["scripts"].items()]


def test_the_recipe_fulfils_the_channel_s_checklist(recipe, root):
    assert any(line.startswith("modular ") for line in recipe["requirements"]["run"])
    assert (root / recipe["about"]["license_file"][0]).exists()
    assert recipe["build"]["number"] == 0
    assert recipe["tests"]


CALLS = """
import maxsoftmax, maxsoftmax._graph.extension, numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

assert (maxsoftmax.softmax(np.zeros((2, 4), np.float32)) == 0.25).all()
types = [TensorType(DType.float32, ("rows", "n"), DeviceRef.CPU())]
with Graph("theirs", input_types=types, custom_extensions=[maxsoftmax.dropin()]) as graph:
    graph.output(ops.softmax(graph.inputs[0].tensor))
model = InferenceSession(devices=[CPU()]).load(graph)
assert (model.execute(np.zeros((2, 4), np.float32))[0].to_numpy() == 0.25).all()
print(maxsoftmax.__file__)
print(maxsoftmax._graph.extension.source())
"""


# Installs a gigabyte, and compiles with an empty cache.
@pytest.mark.slow
def test_a_wheel_runs_in_an_empty_environment(wheel, tmp_path):
    place, folder = tmp_path / "environment", tmp_path / "elsewhere"
    folder.mkdir()
    # MAX tells the processes that this one starts where it lies itself.
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "MODULAR_", "MAXSOFTMAX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    caches = {"MAXSOFTMAX_CACHE_DIR": str(tmp_path / "cache"), "MODULAR_CACHE_DIR": str(tmp_path / "max")}
    environment = {**kept, **caches, "PATH": f"{place / 'bin'}:/usr/bin:/bin"}

    def run(*command):
        return subprocess.run(
            command, cwd=folder, env=environment, check=True, capture_output=True, encoding="utf-8"
        ).stdout

    run(sys.executable, "-m", "venv", place)
    run(place / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)
    assert "64×50257" in run(place / "bin" / "maxsoftmax", "demo")
    where = run(place / "bin" / "python", "-c", CALLS).splitlines()
    assert all(Path(path).is_relative_to(place) for path in where), where
    assert "0.00" in run(place / "bin" / "maxsoftmax", "train")
