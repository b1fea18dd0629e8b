"""The engines' own servers understand what they are started with."""

from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

from offbeat.actor.engines import openai_server
from offbeat.actor.engines.openai_server import choose_engine, transformers_arguments, vllm_arguments
from offbeat.common.errors import SettingError

pytestmark = pytest.mark.slow


@pytest.mark.vllm
def test_vllm_server_takes_the_options_of_the_runs_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr(openai_server, "has_gpu", lambda: False)
    options = {
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
        "hf_overrides": {"rope_theta": 1},
        "cudagraph_capture_sizes": [1, 2],
        "kv_cache_memory_bytes": 1 << 20,
    }
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(vllm_arguments("a/model", "float32", options))
    assert arguments is not None
    engine = AsyncEngineArgs.from_cli_args(arguments)
    assert (engine.model, engine.dtype, engine.max_model_len, engine.enforce_eager) == ("a/model", "float32", -1, True)
    assert {name: getattr(engine, name) for name in options} == options


def test_transformers_server_takes_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer
    from transformers.cli.serve import Serve
    from typer.testing import CliRunner

    monkeypatch.setattr(openai_server, "has_gpu", lambda: True)
    assert "--cb-num-blocks" not in transformers_arguments("a/model", "float32")
    # Without a size the server's cache takes most of the machine's memory.
    monkeypatch.setattr(openai_server, "has_gpu", lambda: False)
    assert "--cb-num-blocks" in transformers_arguments("a/model", "float32")
    application = typer.Typer()
    application.command()(Serve)
    answer = CliRunner().invoke(application, [*transformers_arguments("a/model", "float32"), "--port", "0", "--help"])
    assert answer.exit_code == 0


def test_request_that_exceeds_the_cache_is_refused_and_later_ones_are_answered(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager_class = continuous_api.ContinuousBatchingManager
    # Undone at the end.
    monkeypatch.setattr(manager_class, "add_request", manager_class.add_request)
    openai_server.refuse_what_exceeds_the_cache()
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    config = ContinuousBatchingConfig(page_size=64, num_blocks=2, max_batch_tokens=64, auto_switch_to_flash=False)
    manager = model.init_continuous_batching(GenerationConfig(eos_token_id=-1), config)
    manager.start()
    try:
        for prompt, max_new_tokens in ([5] * 200, 1), ([5] * 100, 30):
            with pytest.raises(HTTPException, match="the cache has room for 128 tokens"):
                manager.add_request(prompt, max_new_tokens=max_new_tokens)
        manager.add_request([5] * 100, max_new_tokens=29)
        assert len(manager.get_result(timeout=60).generated_tokens) == 29
    finally:
        manager.stop(block=True)


def test_engine_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"uvicorn"}
    monkeypatch.setattr(openai_server.importlib.util, "find_spec", lambda name: name if name in installed else None)
    with pytest.raises(SettingError, match='--engine = "vllm": vLLM is not installed'):
        choose_engine("vllm")
    with pytest.raises(SettingError, match=r"its server needs fastapi, openai\. Run: pip install \"transformers\[serving\]\""):
        choose_engine("auto")
    installed |= {"fastapi", "openai"}
    assert choose_engine("auto") == "transformers"
    installed.add("vllm")
    assert choose_engine("auto") == "vllm"
