"""The choice of a flash attention, with a recorder in place of torch's switch: no GPU is needed."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.learner.policy import packed_attention as flash_attention
from offbeat.learner.policy.packed_attention import use_newest_flash_attention


class Recorder:
    """A GPU of some compute capability: the kernels it offers, and the one that was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, capability: int, missing: set[str], broken: set[str]) -> None:
        self.missing, self.broken = missing, broken
        self.active: str | None = None
        self.tried: list[str] = []
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        monkeypatch.setattr(flash_attention, "activate_flash_attention_impl", self.activate)
        monkeypatch.setattr(flash_attention, "restore_flash_attention_impl", self.restore)
        monkeypatch.setattr(flash_attention, "_try_heads", self.try_heads)

    def activate(self, name: str) -> None:
        self.tried.append(name)
        if name in self.missing:
            raise ModuleNotFoundError("No module named 'flash_attn_interface'")
        self.active = name

    def restore(self) -> None:
        assert self.active is not None, "torch warns of this"
        self.active = None

    def try_heads(self, policy: object, device: torch.device) -> None:
        if self.active in self.broken:
            raise RuntimeError("head dimension 32 is not supported")


@pytest.mark.parametrize(
    ("capability", "missing", "broken", "tried", "active"),
    [
        (8, set(), set(), [], None),
        (9, set(), set(), ["FA3"], "FA3"),
        (9, {"FA3"}, set(), ["FA3", "FA4"], "FA4"),
        (9, {"FA3"}, {"FA4"}, ["FA3", "FA4"], None),
        (10, set(), set(), ["FA4"], "FA4"),
        (12, set(), set(), [], None),
    ],
)
def test_the_newest_that_runs_the_heads_is_used(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: int,
    missing: set[str],
    broken: set[str],
    tried: list[str],
    active: str | None,
):
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    recorder = Recorder(monkeypatch, capability=capability, missing=missing, broken=broken)
    with caplog.at_level(logging.INFO, logger=flash_attention.__name__):
        use_newest_flash_attention(policy, torch.device("cuda"))
    assert (recorder.tried, recorder.active) == (tried, active)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(f"flash attention: {active or 'torch'}")
    assert all(reason in message for reason in (["No module named", "head dimension 32"] if broken else []))


def test_on_a_cpu_and_in_float32_nothing_is_switched(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    recorder = Recorder(monkeypatch, capability=9, missing=set(), broken=set())
    use_newest_flash_attention(AutoModelForCausalLM.from_pretrained(tiny_model), torch.device("cuda"))
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    use_newest_flash_attention(policy, torch.device("cpu"))
    assert recorder.tried == []
