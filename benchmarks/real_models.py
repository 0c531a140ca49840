"""Finds where MAX's own models compute a softmax in a graph, and what the drop-in replaces there.

    python benchmarks/real_models.py --json benchmarks/results/real-models.json

Every call of `softmax` and `logsoftmax` is looked up in the source of the package `max`. The class or function around
the call is put into a graph, with small sizes and weights without values. MAX compiles the graph with
`maxsoftmax.dropin()` as far as Mojo, for the CPU of this machine and for a GPU, which is not needed. What cannot be put
into a graph alone is listed with the reason. No weights are downloaded.

Needs what `max.pipelines` imports: `pip install max av transformers requests pillow gguf sentencepiece`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import max.graph
import maxsoftmax
from max import driver
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

MAX = Path(max.graph.__file__).parents[1]
ARCHITECTURES = MAX / "pipelines" / "architectures"
GPU = "sm_90a"

BATCH, TOKENS, VOCABULARY, WIDTH, HEADS = 2, 16, 1000, 64, 4

Builder = Callable[[DeviceRef], Graph]
BUILDERS: dict[str, Builder] = {}
"""How to put a place into a graph."""


def place(*names: str) -> Callable[[Builder], Builder]:
    """Says that a function builds the graph of these places, each "file: class or function"."""

    def register(build: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(names, build))
        return build

    return register


def of(path: str, name: str) -> Any:
    """Returns a class or function of `max.pipelines`."""
    return getattr(import_module(f"max.pipelines.{path}"), name)


def graph(layer: Callable[..., Any], *types: TensorType, weights: Any = None) -> Graph:
    """Returns the graph of a layer of `max.nn`, or of a function that calls the one whose weights are named."""
    owner = weights or layer
    if hasattr(owner, "raw_state_dict"):
        for name, weight in owner.raw_state_dict().items():
            weight.name = name
    with Graph("component", input_types=types) as built:
        results = layer(*(value.tensor for value in built.inputs))
        built.output(*(results if isinstance(results, tuple | list) else [results]))
    return built


def traced(device: DeviceRef, make: Callable[[], Any], *types: TensorType) -> Graph:
    """Returns the graph of a module of `max.experimental.nn`, whose parameters have no values."""
    from max.experimental import functional as F
    from max.experimental.tensor import default_device, default_dtype

    place = device.to_device()
    with F.lazy(), default_device(place), default_dtype(DType.float32):
        module = make()
    extensions = max.graph.default_custom_extensions()
    return module.trace(*types, custom_extensions=extensions).graph


def activations(device: DeviceRef, *shape: int | str, dtype: DType = DType.float32) -> TensorType:
    """Returns the type of an input."""
    return TensorType(dtype, shape, device)


ROUTED = ("tokens", WIDTH)
EXPERTS = {"hidden_dim": WIDTH, "num_experts": 32, "num_experts_per_token": 4}
GROUPS = {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}


def gate(path: str, name: str, **more: Any) -> Builder:
    """Returns what builds the router of a mixture of experts."""

    def build(device: DeviceRef) -> Graph:
        router = of(f"architectures.{path}", name)(devices=[device], dtype=DType.float32, **EXPERTS, **more)
        return graph(router, activations(device, *ROUTED))

    return build


def gate_of_tensors(path: str, name: str, **more: Any) -> Builder:
    """Returns what builds the router of a mixture of experts of `max.experimental.nn`."""

    def build(device: DeviceRef) -> Graph:
        make = of(f"architectures.{path}", name)
        return traced(device, lambda: make(**EXPERTS, **more), activations(device, *ROUTED))

    return build


for file, name, more in (
    ("qwen3.layers.moe", "Qwen3MoEGate", {}),
    ("qwen3vl_moe.nn.moe", "Qwen3VLMoEGate", {}),
    ("gpt_oss.layers.moe", "GptOssMoEGate", {}),
    ("gemma4.layers.moe", "Gemma4MoEGate", {}),
    ("diffusion_gemma.diffusion_gemma", "DiffusionGemmaMoEGate", {}),
    ("deepseekV2.layers.moe_gate", "DeepSeekV2MoEGate", GROUPS),
):
    place(f"pipelines/architectures/{file.replace('.', '/')}.py: {name}")(gate(file, name, **more))

for file, name, more in (
    ("gpt_oss_modulev3.layers.moe", "GptOssMoEGate", {}),
    ("deepseekV2_modulev3.layers.moe_gate", "DeepSeekV2MoEGate", GROUPS),
):
    place(f"pipelines/architectures/{file.replace('.', '/')}.py: {name}")(gate_of_tensors(file, name, **more))


def encoder_settings(device: DeviceRef, kind: str) -> SimpleNamespace:
    """Returns the configuration of BERT or MPNet with one layer."""
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    hugging_face = getattr(transformers, kind)(**sizes, intermediate_size=2 * WIDTH)
    return SimpleNamespace(
        huggingface_config=hugging_face, dtype=DType.float32, device=device, pool_embeddings=True, max_seq_len=512
    )


@place("pipelines/architectures/bert/graph.py: BertSelfAttention")
def bert(device: DeviceRef) -> Graph:
    """Builds the whole of BERT."""
    model = of("architectures.bert.graph", "BertModel")(encoder_settings(device, "BertConfig"))
    return graph(model, *model.input_types())


@place("pipelines/architectures/mpnet/graph.py: MPNetSelfAttention")
def mpnet(device: DeviceRef) -> Graph:
    """Builds the whole of MPNet."""
    model = of("architectures.mpnet.graph", "MPNetModel")(encoder_settings(device, "MPNetConfig"))
    return graph(model, *model.input_types())


@place("pipelines/architectures/mpnet_modulev3/graph.py: MPNetSelfAttention")
def mpnet_of_tensors(device: DeviceRef) -> Graph:
    """Builds MPNet's attention."""
    make = of("architectures.mpnet_modulev3.graph", "MPNetSelfAttention")
    hidden = activations(device, "batch", "tokens", WIDTH)
    mask = activations(device, "batch", 1, 1, "tokens")
    bias = activations(device, 1, HEADS, "tokens", "tokens")
    return traced(device, lambda: make(encoder_settings(device, "MPNetConfig")), hidden, mask, bias)


@place("pipelines/architectures/whisper/encoder.py: WhisperSdpaAttention")
def whisper(device: DeviceRef) -> Graph:
    """Builds a layer of Whisper's encoder."""
    settings = SimpleNamespace(d_model=WIDTH, n_heads=HEADS, encoder_attention_heads=HEADS, encoder_ffn_dim=2 * WIDTH)
    layer = of("architectures.whisper.encoder", "WhisperEncoderLayer")(settings, DType.float32, device)
    return graph(layer, activations(device, "batch", "tokens", WIDTH))


def pixtral_types(device: DeviceRef) -> list[TensorType]:
    """Returns the inputs of Pixtral's attention over the patches of images."""
    turns = activations(device, TOKENS, WIDTH // HEADS)
    mask = activations(device, BATCH, 1, TOKENS, TOKENS)
    return [activations(device, BATCH, TOKENS, WIDTH), mask, turns, turns]


@place("pipelines/architectures/pixtral/vision_encoder/attention.py: Attention")
def pixtral(device: DeviceRef) -> Graph:
    """Builds Pixtral's attention over the patches of images."""
    make = of("architectures.pixtral.vision_encoder.attention", "Attention")
    layer = make(HEADS, WIDTH, WIDTH // HEADS, DType.float32, device)
    return graph(lambda x, mask, *turns: layer(x, mask, turns), *pixtral_types(device), weights=layer)


@place("pipelines/architectures/pixtral_modulev3/vision_encoder/attention.py: Attention")
def pixtral_of_tensors(device: DeviceRef) -> Graph:
    """Builds the same of `max.experimental.nn`: the part that takes values of a graph."""
    make = of("architectures.pixtral_modulev3.vision_encoder.attention", "Attention")
    layer = SimpleNamespace(head_dim=WIDTH // HEADS)
    heads = activations(device, BATCH, HEADS, TOKENS, WIDTH // HEADS)
    rows = activations(device, BATCH, TOKENS, HEADS, WIDTH // HEADS)
    mask = activations(device, BATCH, 1, TOKENS, TOKENS)
    return graph(lambda q, k, v, m: make.attention(layer, q, k, v, m), heads, heads, rows, mask)


@place("pipelines/architectures/autoencoders/autoencoder_kl_qwen_image.py: Attention")
def qwen_image(device: DeviceRef) -> Graph:
    """Builds the attention in the middle of Qwen-Image's autoencoder."""
    make = of("architectures.autoencoders.autoencoder_kl_qwen_image", "Attention")
    layer = make(WIDTH, dtype=DType.float32, device=device)
    return graph(layer, activations(device, 1, WIDTH, 8, 8))


@place("pipelines/architectures/deepseekV4/layers/compressor.py: DeepseekV4Compressor")
def compressor(device: DeviceRef) -> Graph:
    """Builds the pooling of windows of tokens of DeepSeek-V4's attention."""
    settings = SimpleNamespace(hidden_size=WIDTH, qk_rope_head_dim=64, rms_norm_eps=1e-6, dtype=DType.float32)
    ratio, head = 128, 512
    layer = of("architectures.deepseekV4.layers.compressor", "DeepseekV4Compressor")(settings, ratio, head, device)
    windows = activations(device, 1, 4, ratio, head)
    present = activations(device, 1, 4, ratio, dtype=DType.bool)
    return graph(layer, windows, windows, present, activations(device, 1, 4, 32, 2))


@place("pipelines/architectures/minimax_music3/components/condition_encoder.py: ConditionEncoder")
def condition_encoder(device: DeviceRef) -> Graph:
    """Builds the encoder whose softmax mixes the layers of a language model."""
    make = of("architectures.minimax_music3.components.condition_encoder", "ConditionEncoder")
    settings = of("architectures.minimax_music3.model_config", "ConditionEncoderConfig")(condition_hidden_dim=WIDTH)
    frames = activations(device, 1, TOKENS, settings.num_condition_layers * WIDTH)
    return traced(device, lambda: make(settings), frames)


@place("pipelines/architectures/minimax_music3/components/depth_decoder.py: Attention")
def depth_decoder(device: DeviceRef) -> Graph:
    """Builds the attention over the codebooks of a frame."""
    make = of("architectures.minimax_music3.components.depth_decoder", "Attention")
    return traced(device, lambda: make(WIDTH, HEADS), activations(device, BATCH, 8, WIDTH))


@place("nn/sampling/rejection_sampler.py: RejectionSamplerWithResiduals")
def rejection_sampler(device: DeviceRef) -> Graph:
    """Builds the sampler of speculative decoding that compares the probabilities of two models."""
    return of("sampling.sampling", "rejection_sampler_with_residuals")(device)


@place("nn/sampling/rejection_sampler.py: _relaxed_thinking_verdict")
def relaxed(device: DeviceRef) -> Graph:
    """Builds what accepts a draft's tokens by their rank."""
    from max.nn.sampling import rejection_sampler as of_max

    logits = activations(device, "batch", "steps", VOCABULARY)
    tokens = activations(device, "batch", "steps", dtype=DType.int64)
    return graph(lambda x, t: of_max._relaxed_thinking_verdict(x, t, 10, 0.6, DType.int64), logits, tokens)


@place("pipelines/sampling/label_scoring.py: _build_label_scoring_graph")
def label_scoring(device: DeviceRef) -> Graph:
    """Builds the scores of given tokens over the vocabulary."""
    return of("sampling.label_scoring", "_build_label_scoring_graph")(device, DType.bfloat16, VOCABULARY)


BEYOND = {
    "pipelines/architectures/diffusion_gemma/diffusion_gemma.py": "not tried: it needs the whole model and its cache",
    "_interpreter_ops/reduce_axis_gc.py": "not tried: a kernel of the interpreter of single ops",
}
"""Why something cannot be put into a graph alone, by file."""


def places() -> Iterator[str]:
    """Yields every class or function in MAX whose code calls a softmax of graphs, as "file: name"."""
    skipped = ("graph/", "_mlir/", "experimental/", "benchmark/")
    for path in sorted(MAX.rglob("*.py")):
        file = path.relative_to(MAX).as_posix()
        if file.startswith(skipped):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and any(map(_is_softmax, ast.walk(node))):
                yield f"{file}: {node.name}"


def _is_softmax(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("softmax", "logsoftmax", "log_softmax")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("ops", "F")
    )


def users() -> dict[str, list[str]]:
    """Returns the architectures that use each class or function of an architecture, directly or through others.

    A class uses what its methods name, and what methods of its bases name that it neither replaces nor bypasses.
    """
    files = {path.relative_to(MAX).as_posix(): _Source(path) for path in ARCHITECTURES.rglob("*.py")}

    def find(file: str, name: str) -> tuple[str, str] | None:
        """Returns where a name in a file is defined, if that is in an architecture."""
        for _ in range(9):
            source = files.get(file)
            if source is None or name in source.defined:
                return (file, name) if source else None
            if name not in source.imported:
                return None
            module, name = source.imported[name]
            file = next((each for each in (f"{module}.py", f"{module}/__init__.py") if each in files), "")
        return None

    found: dict[str, set[str]] = {}
    for architecture in sorted(path.name for path in ARCHITECTURES.iterdir() if path.is_dir() and path.name[0] != "_"):
        # A definition, and of a base class also which methods a class replaces and which it calls.
        waiting = [
            (file, name, frozenset[str](), frozenset[str]())
            for file, source in files.items()
            for name in source.defined
            if file.split("/")[2] == architecture
        ]
        reached = set(waiting)
        while waiting:
            file, name, replaced, called = waiting.pop()
            found.setdefault(f"{file}: {name}", set()).add(architecture)
            definition = files[file].defined[name]
            named, called = definition.reached(replaced, called)
            own = [(place, frozenset[str](), frozenset[str]()) for place in (find(file, used) for used in named)]
            replaced = replaced.union(definition.methods)
            inherited = [(find(file, base), replaced, called) for base in definition.bases]
            for place, *of_class in own + inherited:
                if place and (*place, *of_class) not in reached:
                    reached.add((*place, *of_class))
                    waiting.append((*place, *of_class))
    return {name: sorted(architectures) for name, architectures in found.items()}


class _Definition:
    """A class or a function: which names its parts use."""

    def __init__(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        is_class = isinstance(node, ast.ClassDef)
        self.bases = set().union(*map(_names, node.bases)) if is_class else set()
        parts = node.body if is_class else [node]
        self.methods = {part.name: part for part in parts if isinstance(part, ast.FunctionDef)} if is_class else {}
        self.rest = [part for part in parts if part not in self.methods.values()]

    def reached(self, replaced: frozenset[str], called: frozenset[str]) -> tuple[set[str], frozenset[str]]:
        """Returns the names that are used, and the attributes, by all but methods that are replaced or never called."""
        waiting = {name: part for name, part in self.methods.items() if name not in replaced}
        kept = list(self.rest)
        while True:
            called |= {node.attr for part in kept for node in ast.walk(part) if isinstance(node, ast.Attribute)}
            more = [name for name in waiting if not name.startswith("_") or name.endswith("__") or name in called]
            if not more:
                return set().union(*map(_names, kept)), called
            kept += [waiting.pop(name) for name in more]


class _Source:
    """What a file defines, and what it imports."""

    def __init__(self, path: Path) -> None:
        package = ["max", *path.relative_to(MAX).parent.parts]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        definitions = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        self.defined = {node.name: _Definition(node) for node in definitions}
        self.imported: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                module = "/".join([*above, *(node.module or "").split(".")][1:]).rstrip("/")
                self.imported.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def inspect(kind: str) -> dict[str, Any]:
    """Returns what the drop-in replaces in each place, on a kind of device."""
    device = DeviceRef.CPU() if kind == "cpu" else DeviceRef.GPU()
    found: dict[str, Any] = {}
    for name in places():
        if name not in BUILDERS:
            continue
        print(f"{kind} {name}", end=" ", file=sys.stderr, flush=True)
        try:
            with max.graph.default_custom_extensions_scope(maxsoftmax.dropin()):
                built = BUILDERS[name](device)
            kernels = maxsoftmax.softmax_kernels(built)
            found[name] = {
                "softmaxes": len(re.findall(r"\bmo\.reduce\.(?:log)?softmax\(", built.module.mlir_module.asm())),
                "kernels": [kernel._asdict() for kernel in kernels],
            }
            print([kernel.name for kernel in kernels], file=sys.stderr, flush=True)
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            print(error, file=sys.stderr, flush=True)
    return found


def record(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what was found on both kinds of device, beside who uses it."""
    used, rows = users(), []
    for name in places():
        each = (
            {kind: found[kind][name] for kind in found} if name in BUILDERS else {"beyond": BEYOND[name.split(":")[0]]}
        )
        rows.append({"place": name, "architectures": used.get(name, []), **each})
    with_softmax = {architecture for row in rows for architecture in row["architectures"]}
    return {
        "command": "python benchmarks/real_models.py --json benchmarks/results/real-models.json",
        "versions": {name: version(name) for name in ("max", "transformers")},
        "gpu": GPU,
        "places": rows,
        "without": sorted({architecture for each in used.values() for architecture in each} - with_softmax),
    }


def main() -> None:
    """Looks at every place on both kinds of device, and writes the record."""
    parser = argparse.ArgumentParser(description="What the drop-in replaces in MAX's own models")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--kind", choices=("cpu", "gpu"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        if options.kind == "gpu":
            driver.set_virtual_device_api("cuda")
            driver.set_virtual_device_count(1)
            driver.set_virtual_device_target_arch(GPU)
        print(json.dumps(inspect(options.kind)))
        return
    # A process has a virtual GPU from its beginning, or never.
    found = {
        kind: json.loads(
            subprocess.run(
                [sys.executable, __file__, "--kind", kind], check=True, stdout=subprocess.PIPE, encoding="utf-8"
            ).stdout
        )
        for kind in ("cpu", "gpu")
    }
    text = json.dumps(record(found), indent=1) + "\n"
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
