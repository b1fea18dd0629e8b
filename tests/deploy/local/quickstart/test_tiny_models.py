"""Tiny models load as any other, and their tokenizers give back what was encoded."""

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat.common.settings.loading import load
from offbeat.deploy.checks.preflight import look
from offbeat.deploy.local.quickstart.prepared import expand
from offbeat.deploy.local.quickstart.tiny_models import make_tiny_model


def test_characters_are_encoded_one_by_one_with_nothing_added(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    token_ids = tokenizer("12=a>").input_ids
    assert len(token_ids) == 5
    assert tokenizer.decode(token_ids) == "12=a>"
    assert tokenizer.decode([*token_ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12=a>"
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


@pytest.mark.parametrize("fixture", ["tiny_model", "tiny_untied_model", "tiny_moe_model", "tiny_bpe_model"])
def test_model_loads_as_float32_and_ends_at_the_tokenizers_end(fixture: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(fixture)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings >= 512
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert torch.isfinite(model(torch.tensor([tokenizer.encode("12")])).logits).all()


def test_head_is_tied_or_not_as_asked(tiny_model: Path, tiny_untied_model: Path) -> None:
    for folder, is_tied in ((tiny_model, True), (tiny_untied_model, False)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied


def test_seed_decides_the_weights_and_the_callers_random_state_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, alphabet="01", seed=seed)
    assert torch.equal(torch.rand(3), expected)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_bpe_tokenizer_encodes_any_text_and_has_a_chat_template(tiny_bpe_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bpe_model)
    assert tokenizer.decode(tokenizer.encode("Ünknown\n 漢字")) == "Ünknown\n 漢字"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"


def test_stand_in_for_gsm8k_has_its_format_and_fits_the_cpu_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = expand(load(Path("examples/gsm8k_cpu/run.toml")))
    look(config, "check")
    rows = [msgspec.json.decode(line) for line in Path(config.data.train_data).read_bytes().splitlines()]
    assert len(rows) == 512
    for row in rows:
        first, second, total = (
            int(number) for number in row["answer"].split("is ")[1].replace("+", "=").split(".")[0].split("=")
        )
        assert first + second == total
        assert row["answer"].endswith(f"#### {total}")
        assert str(first) in row["question"]
