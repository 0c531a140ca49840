"""A CPU rounds to bfloat16 by `rounded` only: an instruction that some have turns subnormal results into 0."""

import re
import subprocess
from pathlib import Path

import pytest
from maxsoftmax._graph.extension import source
from mojo.run import subprocess_run_mojo

KERNELS = {"naive", "contiguous", "strided", "cross_entropy", "sparse", "fused"}
CASTS = {"plain_cast", "plain_cast_of_vectors"}


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """The assembly of each function for a CPU that need not be there, by name."""
    assembly = tmp_path_factory.mktemp("bfloat16") / "bfloat16.s"
    target = ["--target-triple", "x86_64-unknown-linux-gnu", "--target-cpu", "znver5"]
    kernels = Path(__file__).with_name("bfloat16.mojo")
    command = ["build", "--emit", "asm", *target, "-I", str(source().parent), "-o", str(assembly), str(kernels)]
    done = subprocess_run_mojo(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
    assert done.returncode == 0, done.stdout.decode(errors="replace")
    _, *parts = re.split(r"^([A-Za-z_\"].*):(?:\s*#.*)?$", assembly.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_no_kernel_rounds_by_a_cast(functions):
    assert functions.keys() >= KERNELS
    # Casts are there too, so that the instruction is known to be found.
    assert {name for name, body in functions.items() if re.search(r"\bvcvtne\w*bf16", body)} == CASTS
