"""The processor's name tells the model and the instruction sets that choose its kernels."""

from pathlib import Path

import pytest
from msgspec import convert

from offbeat.common.processes.process_table import processor_name
from offbeat.protocols.fields import Label

X86 = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8481C
cpu family\t: 6
model\t\t: 143
flags\t\t: fpu sse avx2 avx512f avx512_bf16 amx_bf16

processor\t: 1
model name\t: another
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 sve\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (X86, "Intel(R) Xeon(R) Platinum 8481C, family 6 model 143 (avx2 avx512f avx512_bf16 amx_bf16)"),
        (X86.replace(" amx_bf16", ""), "Intel(R) Xeon(R) Platinum 8481C, family 6 model 143 (avx2 avx512f avx512_bf16)"),
    ],
)
def test_model_and_instruction_sets_of_the_first_core_are_told(text: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert processor_name("cpu", file) == name


def test_processor_without_a_name_is_told_by_its_architecture(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(ARM)
    assert processor_name("cpu", file).endswith(" (asimd bf16 sve)")
    assert processor_name("cpu", file)[0] != " "
    assert processor_name("cpu", tmp_path / "none") != ""


def test_name_fits_into_a_field_of_the_hello(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(X86.replace("Intel", "Intel" * 200))
    assert convert(processor_name("cpu", file), Label)
