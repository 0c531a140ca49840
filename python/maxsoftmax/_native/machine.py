"""What is told of this machine's processor: what a compiler may have made use of."""

from __future__ import annotations

import functools
import platform

SPELLED = {
    # x86-64: LLVM's name of a feature, and that of Linux where only - and _ would not make the one of the other.
    "avx512bf16": "avx512_bf16",
    "avx512bitalg": "avx512_bitalg",
    "avx512fp16": "avx512_fp16",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxifma": "avx_ifma",
    "avxneconvert": "avx_ne_convert",
    "avxvnni": "avx_vnni",
    "avxvnniint16": "avx_vnni_int16",
    "avxvnniint8": "avx_vnni_int8",
    "bmi": "bmi1",
    "crc32": "sse4_2",
    "lzcnt": "abm",
    "pclmul": "pclmulqdq",
    "prfchw": "3dnowprefetch",
    "sahf": "lahf_lm",
    "sha": "sha_ni",
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "x87": "fpu",
    # aarch64
    "complxnum": "fcma",
    "crc": "crc32",
    "dotprod": "asimddp",
    "fp-armv8": "fp",
    "fp16fml": "asimdfhm",
    "fptoint": "frint",
    "fullfp16": "asimdhp",
    "jsconv": "jscvt",
    "lse": "atomics",
    "neon": "asimd",
    "pauth": "paca",
    "rcpc": "lrcpc",
    "rcpc-immo": "ilrcpc",
    "rdm": "asimdrdm",
}

UNUSED = frozenset(
    (
        *("cldemote", "clflushopt", "clwb", "clzero", "enqcmd", "fsgsbase", "hreset", "invpcid", "kl", "mwaitx"),
        *("pconfig", "pku", "prefetchi", "ptwrite", "rdpid", "rdpru", "rdrnd", "rdseed", "serialize", "sgx", "shstk"),
        *("tsxldtrk", "uintr", "usermsr", "waitpkg", "wbnoinvd", "widekl", "xsave", "xsavec", "xsaveopt", "xsaves"),
        *("ccdp", "ccpp", "perfmon", "predres", "rand", "ras", "spe", "specrestrict"),
    )
)
"""Features that Linux may not tell of, and that no compiler uses of itself: for kernels, debuggers and the like."""


@functools.cache
def processor() -> str:
    """Returns what the compiler may see of this machine's processor."""
    try:
        # The first processor stands for all; with hundreds of them the file takes a while.
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(16384).partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    told = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.startswith(told))


def missing(features: list[str]) -> list[str]:
    """Returns those features, by LLVM's names, that this processor does not have, or is not known to have."""
    flags = set()
    for line in processor().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
    return [f for f in features if f not in UNUSED and SPELLED.get(f, f.replace("-", "_")) not in flags]
