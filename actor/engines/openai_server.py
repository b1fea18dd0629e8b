"""The OpenAI-compatible server that comes with an engine, as a program.

    python -m offbeat.actor.engines.openai_server vllm|transformers ARGUMENT...

The arguments are those of `vllm serve` or `transformers serve`. All that the server starts ends with it, however it ends, and
it ends with the process in `PARENT_VARIABLE`.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from offbeat.common.errors import SettingError
from offbeat.common.processes.child import guard_session
from offbeat.common.processes.environment import has_gpu, prepare_environment
from offbeat.common.processes.shutdown import PARENT_VARIABLE, die_with_parent, end_process

MODULE = "offbeat.actor.engines.openai_server"
CPU_KV_CACHE_BYTES = 1 << 30
"""KV cache on a CPU, where vLLM would take nine tenths of the machine's memory."""
SERVER_PACKAGES = ("fastapi", "openai", "uvicorn")
"""Packages that the server of transformers needs; vLLM brings them."""


def choose_engine(name: Literal["auto", "vllm", "transformers"]) -> Literal["vllm", "transformers"]:
    """Return the engine whose server will run; raise `SettingError` where its packages are missing."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    if name == "vllm" and not has_vllm:
        cure = "Install offbeat[cpu] or offbeat[cuda], or give --engine transformers."
        raise SettingError("--engine", name, "vLLM is not installed", cure)
    if has_vllm and name != "transformers":
        return "vllm"
    missing = [package for package in SERVER_PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        cure = 'Run: pip install "transformers[serving]"'
        raise SettingError("--engine", "transformers", f"its server needs {', '.join(missing)}", cure)
    return "transformers"


def vllm_arguments(model: str, dtype: str, options: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `vllm serve` for a model folder; `options` are those of `actor.engine_options`.

    The context is as long as the model and the memory allow: an evaluation asks for more tokens than training did.
    """
    arguments = ["--model", model, "--dtype", dtype, "--max-model-len", "auto"]
    arguments += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning", "--no-use-tqdm-on-load"]
    if not has_gpu():
        arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    for name, value in options.items():
        arguments += _as_arguments(name.replace("_", "-"), value)
    return arguments


def transformers_arguments(model: str, dtype: str) -> list[str]:
    """Return the arguments of `transformers serve` for a model folder."""
    arguments = [model, "--dtype", dtype, "--continuous-batching"]
    if not has_gpu():
        # As the actor's engine has it on a CPU. By default the cache takes eight or nine tenths of the machine's memory.
        arguments += ["--cb-block-size", "64", "--cb-num-blocks", "512", "--cb-max-batch-tokens", "512"]
    return arguments


def refuse_what_exceeds_the_cache() -> None:
    """Let the server of transformers answer with status 400 where a prompt and its completion together exceed its cache.

    A request that outgrows the cache ends the server's batching, and no other request is answered from then on.
    """
    from starlette.exceptions import HTTPException
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    add_request = ContinuousBatchingManager.add_request

    def add(manager: ContinuousBatchingManager, input_ids: list[int], *, max_new_tokens: int, **options: Any) -> str | None:
        config = manager.continuous_batching_config
        # None on a GPU until the first request has made the cache. The last token takes no room in it.
        if config.num_blocks is not None and len(input_ids) + max_new_tokens > config.num_blocks * config.page_size + 1:
            room = f"the cache has room for {config.num_blocks * config.page_size} tokens (--cb-num-blocks)"
            problem = f"{len(input_ids)} tokens of the prompt and up to {max_new_tokens} new ones are too many: {room}"
            raise HTTPException(400, problem)
        return add_request(manager, input_ids, max_new_tokens=max_new_tokens, **options)

    ContinuousBatchingManager.add_request = add  # pyright: ignore[reportAttributeAccessIssue]


def import_model_class() -> None:
    """Import the class of the served model in this process, as the actor's engine does."""
    from transformers import PreTrainedConfig

    from offbeat.actor.engines.vllm_images import import_classes

    fields, _ = PreTrainedConfig.get_config_dict(sys.argv[sys.argv.index("--model") + 1])
    import_classes(fields.get("architectures") or ())


def _as_arguments(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value)]


def main() -> None:
    """Run the server that the command line names, until a signal ends it."""
    if (parent := os.environ.pop(PARENT_VARIABLE, None)) is not None:
        die_with_parent(int(parent))
    guard_session()
    # The server has the machine for itself, unlike the services of a run.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    prepare_environment()
    engine = sys.argv.pop(1)
    if engine == "vllm":
        import_model_class()
        from vllm.entrypoints.launchers.api_server.entry import main as serve

        serve()
    else:
        import typer
        from transformers.cli.serve import Serve

        refuse_what_exceeds_the_cache()
        typer.run(Serve)
    # Libraries write pages about what they leak at the end of an interpreter.
    end_process(0)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # vLLM spawned this process; it imports this module before anything else.
    prepare_environment()
    import_model_class()
