"""The code of the README and of the pages: Python runs, and commands are read by the programs that they call."""

import ast
import inspect
import json
import re
import shlex
import shutil
import subprocess
import tomllib

import maxsoftmax
import numpy as np
import pytest
from maxsoftmax._commands import cli
from maxsoftmax._graph.extension import run_mojo, source

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)

GRAPH = """
import maxsoftmax, numpy as np
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
cpu = DeviceRef.CPU()
types = [TensorType(kind, shape, cpu) for kind, shape in (
    (DType.float32, (2, 4, 5, 5)), (DType.bool, (2, 1, 1, 5)), (DType.bool, (2, 4, 5, 5)), (DType.float32, ()))]
"""

BEFORE = {
    ("torch.md", 0): """
import torch
scores, targets = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
logits = torch.randn(4, 5, requires_grad=True)
model, batch = torch.nn.Softmax(dim=-1), scores
""",
    ("jax.md", 0): "",
    ("jax.md", 1): "import jax, maxsoftmax.jax",
    ("sharding.md", 0): """
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
shard, targets, group = torch.zeros(2, 4, requires_grad=True), torch.tensor([0, 3]), torch.distributed.group.WORLD
""",
    ("sharding.md", 1): """
import maxsoftmax.torch, torch
from torch.distributed.tensor import DTensor, Shard
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
shard, targets = torch.zeros(2, 4, requires_grad=True), torch.tensor([0, 3])
""",
    ("sharding.md", 2): """
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
shards = [TensorType(DType.float32, ("rows", n), DeviceRef.CPU()) for n in (4, 3)]
classes = TensorType(DType.int64, ("rows",), DeviceRef.CPU())
graph = Graph("loss", input_types=[*shards, classes]).__enter__()
*shards, target = graph.inputs
signals = []
""",
    ("dropin.md", 0): f"""{GRAPH}
graph = Graph("fused", input_types=types, custom_extensions=[maxsoftmax.dropin()]).__enter__()
x, _, keep, scale = (value.tensor for value in graph.inputs)
x = logits = ops.reshape(x, (8, 5, 5))
mask = dropped = keep = ops.reshape(keep, (8, 5, 5))
mask, weights, temperature = ops.cast(mask, DType.float32), x, scale
minus_infinity = ops.constant(-np.inf, DType.float32, cpu)
""",
    ("dropin.md", 1): f"""{GRAPH}
graph = Graph("named", input_types=types, custom_extensions=[maxsoftmax.extension()]).__enter__()
scores, padding, _, _ = (value.tensor for value in graph.inputs)
head_dim = 64
""",
    ("dropin.md", 2): f"""{GRAPH}
with Graph("theirs", input_types=types[:1], custom_extensions=[maxsoftmax.dropin()]) as graph:
    graph.output(ops.softmax(graph.inputs[0].tensor))
""",
    ("models.md", 0): f"""{GRAPH}
import max.graph
def build():
    with Graph("theirs", input_types=types[:1]) as graph:
        graph.output(ops.softmax(graph.inputs[0].tensor))
    return graph
""",
}
"""What comes before blocks of `py`, which are parts of a program, by page and number."""

AFTER = {
    ("sharding.md", 0): "torch.distributed.destroy_process_group()",
    ("dropin.md", 0): "graph.__exit__(None, None, None)",
    ("dropin.md", 1): "graph.__exit__(None, None, None)",
}
"""What comes after them, whatever they raise."""

TAKES_A_GPU = ("arrays.md", 0)
"""Builds every library, and some of a GPU: only its arguments are looked at."""


def documents(root):
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]


def blocks(root, language):
    """Returns every block of a language: its page, its number there, and its text."""
    return [
        (path.name, i, text)
        for path in documents(root)
        for i, text in enumerate(text for kind, text in FENCE.findall(path.read_text()) if kind == language)
    ]


def pytest_generate_tests(metafunc):
    root = metafunc.config.rootpath
    for name, language in (("program", "python"), ("part", "py")):
        if name in metafunc.fixturenames:
            found = blocks(root, language)
            metafunc.parametrize(name, found, ids=[f"{page}-{i}" for page, i, _ in found])
    if "command" in metafunc.fixturenames:
        metafunc.parametrize("command", sorted({line for *_, text in blocks(root, "sh") for line in lines(text)}))


def lines(text):
    """Returns the commands of a block, with what is continued in one line."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [command.strip() for line in joined.splitlines() for command in line.split("&&") if command.strip()]


def test_programs_run(program):
    page, number, text = program
    exec(compile(text, f"{page}, program {number}", "exec"), {})


def test_programs_in_mojo_run(root, tmp_path):
    (*_, program), *others = blocks(root, "mojo")
    assert not others
    path = tmp_path / "program.mojo"
    path.write_text(program)
    (low, high) = run_mojo("run", "-I", str(source().parent), str(path)).split()
    assert (float(low), float(high)) == pytest.approx((0.25, 0.6439142))


def test_programs_in_c_are_c(root, tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    for _, i, text in blocks(root, "c"):
        path = tmp_path / f"{i}.c"
        path.write_text("#include <stdint.h>\n" + text)
        subprocess.run([compiler, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", path], check=True, timeout=60)


def test_parts_of_programs_run(part, monkeypatch, tmp_path):
    page, number, text = part
    if (page, number) == TAKES_A_GPU:
        monkeypatch.setattr(maxsoftmax, "warm_up", inspect.signature(maxsoftmax.warm_up).bind)
        exec(text, {"maxsoftmax": maxsoftmax})
        return
    for needed in {"torch.md": "torch", "sharding.md": "torch.distributed", "jax.md": "jax"}.get(page, "").split():
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(BEFORE[page, number], names)
    try:
        exec(compile(text, f"{page}, part {number}", "exec"), names)
    finally:
        exec(AFTER.get((page, number), ""), names)


def test_commands_are_understood(command, root):
    program, *arguments = shlex.split(command)
    if program == "maxsoftmax":
        assert cli._parser().parse_args(arguments).command
    elif program == "pip":
        extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for asked in re.findall(r"\[(.*?)\]", command):
            assert set(asked.split(",")) <= extras.keys()
    elif program in ("python", "python3", "pytest", "torchrun", "mojo"):
        # What they read is there, and torchrun's program knows its options.
        read = [word for word in arguments if word.endswith((".py", ".mojo")) or word.startswith("tests/")]
        assert all((root / word).exists() for word in read), read
        if program == "torchrun":
            options = [word for word in arguments[arguments.index(read[0]) :] if word.startswith("--")]
            assert all(f'"{option.strip("-")}"' in (root / read[0]).read_text().replace("--", "") for option in options)
    else:
        assert program in (".", "cc", "mkdocs", "pre-commit", "ruff", "mypy"), command


def test_what_the_page_on_the_command_runs_runs(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("logits.npy", np.zeros((2, 4), np.float32))
    for name, record in {"cpu": "cpu-xeon", "ladder": "h200-ladder"}.items():
        shutil.copy(root / "benchmarks" / "results" / f"{record}.json", f"{name}.json")
    text = (root / "docs" / "commands.md").read_text()
    quick = ("run", "info", "bench report")
    ran = [
        line.split(maxsplit=1)[1]
        for kind, block in FENCE.findall(text)
        if kind == "sh"
        for line in lines(block)
        if line.startswith(tuple(f"maxsoftmax {name}" for name in quick))
    ]
    assert len(ran) == 4
    for line in ran:
        assert cli.main(shlex.split(line)) == 0, capsys.readouterr()
    np.testing.assert_array_equal(np.load("probabilities.npy"), np.full((2, 4), 0.25, np.float32))


def notebook(root):
    return json.loads((root / "examples" / "tour.ipynb").read_text())


def test_the_notebook_shows_what_its_cells_return(root):
    names = {}
    cells = [cell for cell in notebook(root)["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        assert shown(cell) == returned("".join(cell["source"]), names)


def shown(cell):
    """Returns the text below a cell, None if there is none."""
    for output in cell["outputs"]:
        return "".join(output["data"]["text/plain"])
    return None


def returned(source, names):
    """Runs a cell as Jupyter does, and returns how its last expression is written."""
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    value = None if last is None else eval(compile(last, "cell", "eval"), names)
    return None if value is None else repr(value)
