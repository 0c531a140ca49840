import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tasks(root):
    with (root / "pixi.toml").open("rb") as file:
        return {name: task["cmd"] for name, task in tomllib.load(file)["tasks"].items()}


def run(command, folder, environment):
    # The tools of the environment that runs these tests, as pixi would have them.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # What mypy knows of a file holds wherever the file lies.
    known = str(Path(__file__).parents[1] / ".mypy_cache")
    environment = {**environment, "PATH": path, "PYTHONPATH": "python", "MYPY_CACHE_DIR": known}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def checkout(root, tmp_path):
    for name in ("op", "python", "tests"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(root / name, tmp_path)
    return tmp_path


def test_there_is_a_test_for_every_task(tasks):
    assert set(tasks) == {"demo", "bench", "test", "format", "lint", "docs"}


def test_demo(tasks, root, environment):
    assert "64×50257" in run(tasks["demo"], root, environment)


def test_bench(tasks, root, environment):
    # Whole suites take minutes.
    assert "numpy" in run(f"{tasks['bench']} --shape 4x5 --providers numpy", root, environment)


def test_docs(tasks, root, tmp_path, environment):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    run(f"{tasks['docs']} --site-dir {tmp_path}", root, environment)
    # The README, the notebook, and a page for every file; a function of every module.
    assert {path.parent.name for path in tmp_path.glob("*/index.html")} >= {"tour", "kernels", "api"}
    reference = (tmp_path / "api" / "index.html").read_text()
    for name in ("softmax", "ops.softmax", "nn.Softmax", "torch.softmax", "torch.distributed.softmax", "jax.softmax"):
        assert f'id="maxsoftmax.{name}"' in reference, name
    # Functions and structs of the package for Mojo programs.
    reference = (tmp_path / "mojo-reference" / "index.html").read_text()
    for name in ("softmax", "token_log_probs", "rows"):
        assert f'id="{name}"' in reference, name


def test_lint(tasks, checkout, environment):
    assert "Mojo files are formatted" in run(tasks["lint"], checkout, environment)


def test_format_undoes_disorder_and_lint_sees_it(tasks, checkout, environment):
    files = [
        checkout / "op" / "maxsoftmax" / "io" / "rows.mojo",
        checkout / "python" / "maxsoftmax" / "ops" / "__init__.py",
    ]
    tidy = [file.read_text() for file in files]
    for file, text in zip(files, tidy, strict=True):
        file.write_text(text.replace("    return ", "    return  "))
        with pytest.raises(AssertionError):
            run(tasks["lint"], checkout, environment)
        run(tasks["format"], checkout, environment)
        assert file.read_text() == text


def test_test(tasks, root, environment):
    # The whole of it is what runs this.
    assert "test_test" in run(f"{tasks['test']} -n 0 --collect-only -q tests/test_tasks.py", root, environment)
