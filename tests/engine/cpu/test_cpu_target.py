"""Which kernels a CPU gets, by its feature flags."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.engine.cpu.toolchain.cpu_target import (
    AMX,
    NEON,
    X86_LEVELS,
    UnsupportedCpu,
    level_of,
    levels_of,
    runs_here,
    this_level,
)

SANDY_BRIDGE = "fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt xsave avx aes pclmulqdq"
HASWELL = f"{SANDY_BRIDGE} fma movbe f16c rdrand abm bmi1 avx2 bmi2 erms"
SKYLAKE_X = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl clwb"
ZEN_4 = f"{SKYLAKE_X} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 amx_tile amx_int8"
KNIGHTS_LANDING = f"{HASWELL} avx512f avx512pf avx512er avx512cd"
M1 = "processor\t: 0\nBogoMIPS\t: 48.00\nFeatures\t: fp asimd bf16\nCPU part\t: 0x022\n"
GRAVITON = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd sve bf16\nCPU part\t: 0xd40\n"


def _cpuinfo(*cores: str) -> str:
    texts = (f"processor\t: {i}\nflags\t\t: {flags}\nbugs\t\t:\n" for i, flags in enumerate(cores))
    return "\n".join(texts)


@pytest.mark.parametrize(
    ("cores", "level"),
    [
        ([HASWELL], "avx2"),
        ([KNIGHTS_LANDING], "avx2"),
        ([SKYLAKE_X, SKYLAKE_X], "avx512"),
        ([ZEN_4], "avx512bf16"),
        ([ZEN_4, HASWELL, ZEN_4], "avx2"),
        ([SAPPHIRE_RAPIDS], "amx"),
        ([SAPPHIRE_RAPIDS, ZEN_4], "avx512bf16"),
    ],
)
def test_level_is_the_best_that_all_cores_support(cores: list[str], level: str) -> None:
    for machine in ("x86_64", "AMD64"):
        assert level_of(machine, _cpuinfo(*cores), lambda: True).name == level


def test_process_without_permission_for_tiles_gets_the_level_below() -> None:
    """All processes of a sandbox run on one kernel, so they all get the same level."""
    assert level_of("x86_64", _cpuinfo(SAPPHIRE_RAPIDS), lambda: False).name == "avx512bf16"
    assert _level_of_a_process(refuses=False) == this_level().name, "positive control"
    if this_level() == AMX:
        assert _level_of_a_process(refuses=True) == "avx512bf16"


_SMALL_SIGNAL_STACK = """
class Stack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
"""


def _level_of_a_process(*, refuses: bool) -> str:
    """The level that a new process detects. `refuses`: Linux denies it AMX tiles, which do not fit its signal stack."""
    detect = "from app.engine.cpu.toolchain.cpu_target import this_level; print(this_level().name)"
    script = f"import ctypes\n{_SMALL_SIGNAL_STACK if refuses else ''}{detect}"
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("text", [_cpuinfo(SANDY_BRIDGE), _cpuinfo(HASWELL.replace("fma", "")), _cpuinfo(""), ""])
def test_unsupported_cpu_has_a_reason(text: str) -> None:
    with pytest.raises(UnsupportedCpu, match=r"has no .*fma|does not list"):
        level_of("x86_64", text)


def test_arm_has_one_level_and_other_architectures_have_none() -> None:
    assert level_of("aarch64", GRAVITON) == level_of("arm64", M1) == NEON
    for machine in ("ppc64le", "riscv64"):
        with pytest.raises(UnsupportedCpu, match=f"neither x86-64 nor 64-bit ARM, but {machine}"):
            level_of(machine, "")


def test_container_has_every_level_whatever_machine_builds_it() -> None:
    assert levels_of("x86_64") == levels_of("AMD64") == X86_LEVELS and levels_of("arm64") == (NEON,)


@pytest.mark.parametrize(("flags", "runs"), [(SKYLAKE_X, [False, False, True, True]), (SANDY_BRIDGE, [False] * 4)])
def test_machine_runs_its_own_level_and_lower_ones(
    monkeypatch: pytest.MonkeyPatch, flags: str, runs: list[bool]
) -> None:
    monkeypatch.setattr("app.engine.cpu.toolchain.cpu_target.platform.machine", lambda: "x86_64")
    monkeypatch.setattr("app.engine.cpu.toolchain.cpu_target.Path.read_text", lambda _path: _cpuinfo(flags))
    assert [runs_here(level) for level in X86_LEVELS] == runs
