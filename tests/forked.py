"""Processes that tests fork from one that has imported the heavy libraries.

multiprocessing has one fork server for a whole test process, and one list of the modules that it imports first. A second list
would replace the first, and each fork would spend seconds on the imports that it lacks.
"""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "pytest",
        "offbeat.actor.weights.receiver",
        "offbeat.learner.training.ranks",
        "offbeat.learner.training.trainer_state",
        "offbeat.learner.weights.publisher",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ]
)
