import os
import re

import pytest
from maxsoftmax._native import build, machine

ZEN5 = (
    "adx aes avx avx2 avx512bf16 avx512bitalg avx512bw avx512cd avx512dq avx512f avx512ifma avx512vbmi avx512vbmi2 "
    "avx512vl avx512vnni avx512vp2intersect avx512vpopcntdq avxvnni bmi bmi2 clflushopt clwb clzero crc32 cx16 cx8 "
    "f16c fma fsgsbase fxsr gfni invpcid lzcnt mmx movbe pclmul popcnt prfchw rdpid rdrnd rdseed sahf sha shstk sse "
    "sse2 sse3 sse4.1 sse4.2 sse4a ssse3 vaes vpclmulqdq x87 xsave xsavec xsaveopt xsaves"
)


FLAGS = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 ht syscall nx "
    "mmxext fxsr_opt pdpe1gb rdtscp lm constant_tsc rep_good nopl xtopology nonstop_tsc cpuid extd_apicid "
    "tsc_known_freq pni pclmulqdq ssse3 fma cx16 pcid sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer aes xsave "
    "avx f16c rdrand hypervisor lahf_lm cmp_legacy cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw topoext "
    "vmmcall fsgsbase tsc_adjust bmi1 avx2 smep bmi2 erms invpcid avx512f avx512dq rdseed adx smap avx512ifma "
    "clflushopt clwb avx512cd sha_ni avx512bw avx512vl xsaveopt xsavec xgetbv1 xsaves avx_vnni avx512_bf16 clzero "
    "xsaveerptr arat avx512vbmi umip avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq "
    "rdpid fsrm avx512_vp2intersect"
)


def test_a_processor_has_what_linux_says(monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: f"model name\t: AMD EPYC\nflags\t\t: {FLAGS}")
    assert machine.missing(ZEN5.split()) == []
    assert machine.missing(["avx512fp16", "amx-tile", "avx"]) == ["avx512fp16", "amx-tile"]
    older = re.sub(r"avx512_bf16|avx_vnni", "", FLAGS)
    monkeypatch.setattr(machine, "processor", lambda: f"flags\t\t: {older}")
    assert machine.missing(ZEN5.split()) == ["avx512bf16", "avxvnni"]


def test_an_unknown_processor_has_nothing(monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: "arm")
    assert machine.missing(["neon"]) == ["neon"]


def test_arm_has_names_of_its_own(monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: "Features\t: fp asimd aes sha2 crc32 atomics asimdrdm lrcpc")
    assert machine.missing(["fp-armv8", "neon", "aes", "sha2", "crc", "lse", "rdm", "rcpc", "perfmon"]) == []
    assert machine.missing(["neon", "sve"]) == ["sve"]


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo"), reason="no Linux")
def test_this_processor_has_what_the_compiler_uses_here():
    features = build.features()
    assert features
    assert machine.missing(features) == []
