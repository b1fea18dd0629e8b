"""Options of an engine that `actor.engine_options` may not set. Imports no engine: the preflight reads them too."""

RESERVED = {
    "vllm": {
        "model": "it is model.path",
        "dtype": "it is model.dtype",
        "max_model_len": "it is model.max_length",
        "seed": "every actor has its own",
        "logprobs_mode": "behavior log-probs must be those of the distribution sampled from",
        "scheduling_policy": "the canary must not wait behind queued completions",
        "pipeline_parallel_size": "a step of another stage would be in flight when weights change",
        "worker_extension_cls": "weights are loaded through it",
        "enable_return_routed_experts": "it follows loss.routing_replay and metrics.routing_interval",
        "limit_mm_per_prompt": "it follows data.image_field",
        "skip_mm_profiling": "it follows data.image_field",
        "mm_device_do_normalize": "patches of images are normalized as the learner's are",
    },
    "transformers": {
        "return_logprobs": "behavior log-probs are what the learner trains on",
        "per_request_processors": "every lease has its temperature",
        "use_async_batching": "tokens of a step in flight would be counted under the wrong policy version",
        "allow_block_sharing": "new prompts would be continued from keys of older weights",
        "seed": "every actor has its own",
    },
}
"""Reasons by engine and option. Whatever the engine's file sets over a user's value belongs here."""
