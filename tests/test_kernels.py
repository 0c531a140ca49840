import subprocess
from pathlib import Path

import pytest
from maxsoftmax._graph.extension import extension
from mojo.run import subprocess_run_mojo

KERNELS = Path(__file__).parent / "kernels"

ANYWHERE = [
    "test_alignment.mojo",
    "test_columns.mojo",
    "test_exponential.mojo",
    "test_masked.mojo",
    "test_online.mojo",
    "test_rows.mojo",
    "test_shares.mojo",
]
ON_GPU = ["test_gpu.mojo", "test_gpu_gradients.mojo"]


def run(name):
    # As users' models have it, compiled once for all.
    command = ["run", "-I", str(extension().parent), str(KERNELS / name)]
    done = subprocess_run_mojo(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
    output = done.stdout.decode(errors="replace")
    assert done.returncode == 0, output
    assert " 0 failed" in output, output


@pytest.mark.parametrize("name", ANYWHERE)
def test_mojo(name):
    run(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_mojo_on_a_gpu(name):
    run(name)


def test_every_mojo_test_is_run():
    assert {path.name for path in KERNELS.iterdir()} == {*ANYWHERE, *ON_GPU}
