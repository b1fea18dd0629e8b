"""Rules of resuming a run: the outcome of a difference, for each setting and each content of a run.

A difference is refused where the run would not be the same any more: the kept groups, the weights and the numbers belong to
one policy, to these prompts and to this objective. It is recorded where it only changes how the run goes on. `run_identity` of
the learner applies the rules, and `docs/resuming.md` is generated from them.
"""

from typing import Literal, NamedTuple

Outcome = Literal["refused", "recorded", "ignored"]


class Rule(NamedTuple):
    """The outcome of a difference in any of these names."""

    outcome: Outcome
    names: tuple[str, ...]
    """Settings, or contents (`SETTING: CONTENT`, `software: PACKAGE`)."""
    why: str


def _of(section: str, keys: str) -> tuple[str, ...]:
    return tuple(f"{section}.{key}" for key in keys.split())


RULES = (
    Rule("ignored", _of("run", "resume grace_s"), "It only says how the run ends and continues."),
    Rule("recorded", _of("run", "dir mirror"), "A run's folder may be moved."),
    Rule("refused", _of("run", "seed"), "The order of the prompts follows from it."),
    Rule(
        "refused",
        ("model.path: config", "model.path: weight files", "model.path: tokenizer", "model.path: chat template"),
        "The weights come from this model, and kept groups are tokens of this tokenizer.",
    ),
    Rule("recorded", _of("model", "path max_length"), "The model's files are compared themselves. A length is only a limit."),
    Rule("refused", _of("model", "dtype"), "The checkpoint is stored in it, and the log-probs are computed in it."),
    Rule(
        "refused",
        ("data.train_data: prompts",),
        "Kept groups are completions of these prompts: their tokens, their rows with the answers, their weights, their order. "
        "Prompts behind the last are recorded with `data.appended_data`.",
    ),
    Rule(
        "recorded",
        _of("data", "train_data train_split appended_data max_prompt_tokens long_prompts"),
        "The prompts that are read with it are compared themselves.",
    ),
    Rule(
        "refused",
        _of(
            "data",
            "prompt_field image_field weight_field system_prompt system_prompt_field chat_template template_arguments "
            "template_arguments_field",
        ),
        "Prompts and weights are made of the rows with it.",
    ),
    Rule(
        "recorded",
        _of("data", "task_field"),
        "It splits numbers that are shown. With `data.curriculum` the tasks that have shares must be there.",
    ),
    Rule("recorded", _of("data", "curriculum"), "The log has the shares that it gave; it decides on those to come."),
    Rule("recorded", _of("data", "eval_data eval_split"), "No training depends on it."),
    Rule("recorded", ("data.eval_data: prompts",), "No training depends on them; evaluations before and after differ."),
    Rule("refused", _of("task", "environment reward reward_weights"), "Kept groups were made with the other function."),
    Rule(
        "recorded",
        (
            "data.train_data: source files",
            "data.curriculum: source files",
            "task.environment: source files",
            "task.reward: source files",
            "reward.length_penalty: source files",
            "loss.function: source files",
            "loss.correction: source files",
            "advantage.function: source files",
            "evaluation.function: source files",
        ),
        "A mistake in it may be corrected. Kept groups keep the rewards they have, and prompts are compared themselves.",
    ),
    Rule("recorded", _of("task", "reward_timeout_s reward_retry_s"), "It limits a wait."),
    Rule(
        "recorded",
        _of("environment", "workers turn_timeout_s episode_timeout_s close_timeout_s max_retries"),
        "It says when an episode is played again or given up.",
    ),
    Rule("recorded", _of("environment", "python requirements"), "It says where the environment runs."),
    Rule("refused", _of("environment", "tool_parser reasoning_parser sampling arguments"), "Kept groups were played with it."),
    Rule("refused", _of("judge", "model options"), "Kept groups have the other judge's rewards."),
    Rule(
        "recorded",
        _of("judge", "url key_env max_concurrent requests_per_minute timeout_s max_retries budget_tokens cache"),
        "It says how the judge is reached, not who it is.",
    ),
    Rule(
        "refused",
        _of("rollout", "group_size max_new_tokens temperature"),
        "Kept groups, and leases that actors still hold, were sampled with it.",
    ),
    Rule("recorded", _of("rollout", "lease_timeout_s max_lease_attempts"), "It says when a lease is given up."),
    Rule(
        "recorded",
        _of("staleness", "max_staleness target staleness_policy hard_max_staleness lag_of selection auto"),
        "`offbeat set` may change it during the run, too.",
    ),
    Rule(
        "refused",
        _of("reward", "overlong_buffer overlong_penalty length_penalty norm_mean norm_std clip"),
        "It is part of the objective.",
    ),
    Rule(
        "refused",
        _of("advantage", "function baseline turns divide_by_std whiten clip gamma gae_lambda"),
        "It is part of the objective, and decides whether the checkpoint has a critic.",
    ),
    Rule("recorded", _of("loss", "clip_low clip_high"), "`offbeat set` may change it during the run, too."),
    Rule("recorded", _of("loss", "noise_floor"), "It only splits numbers that are shown."),
    Rule("recorded", ("loss.noise_floor: file",), "It only splits numbers that are shown."),
    Rule(
        "refused",
        _of(
            "loss",
            "objective function anchor routing_replay dual_clip "
            "correction normalize_correction aggregation aggregation_length entropy_coef zero_variance",
        ),
        "It is part of the objective.",
    ),
    Rule(
        "refused",
        (*_of("kl", "estimator loss_coef unbiased reward_coef target reference"), "kl.reference: weight files"),
        "It is part of the objective.",
    ),
    Rule("refused", _of("critic", "loss_coef value_clip"), "It is part of the objective."),
    Rule("refused", _of("lora", "rank alpha target_modules"), "The checkpoint holds an adapter of this shape."),
    Rule("recorded", _of("train", "num_steps"), "A run may be given more steps. A schedule that decays is stretched."),
    Rule("recorded", _of("train", "learning_rate"), "`offbeat set` may change it during the run, too."),
    Rule(
        "recorded",
        _of("train", "lr_schedule warmup_steps on_policy_ess max_grad_norm"),
        "It says how far each further step goes.",
    ),
    Rule(
        "refused",
        _of("train", "weight_decay adam_betas"),
        "The checkpoint's optimizer has it, and would go on with its own value.",
    ),
    Rule(
        "refused",
        _of("train", "groups_per_step steps_per_batch epochs_per_batch"),
        "Each step would train on other groups.",
    ),
    Rule("refused", _of("train", "fp32_head"), "The log-probs are computed with it."),
    Rule("refused", _of("train", "zero_stage deepspeed"), "The optimizer's state is stored in its shape."),
    Rule(
        "recorded",
        _of("train", "micro_batch_tokens sequence_parallel_size activation_checkpointing"),
        "It trades memory for time.",
    ),
    Rule("recorded", _of("train", "compile"), "Compiled layers round differently, within a dtype's precision."),
    Rule(
        "recorded",
        _of("train", "checkpoint_interval keep_checkpoints max_failed_leases no_actor_timeout_s no_group_timeout_s"),
        "It says what is kept, and when the run is given up.",
    ),
    Rule(
        "recorded",
        _of("hub", "address bind key learner_key allowed_keys max_actors heartbeat_s dead_after_s max_message_mb"),
        "It says how services find and trust each other.",
    ),
    Rule("recorded", _of("log", "enabled fsync segment_mb retain_mb min_free_mb"), "It says how groups are kept."),
    Rule(
        "recorded",
        _of(
            "weights",
            "backend port pull_port delta on_canary_mismatch canary_tolerance bucket_mb timeout_s interval",
        ),
        "It says how weights travel.",
    ),
    Rule(
        "recorded",
        _of(
            "actor",
            "name engine engine_options max_inflight_groups on_update reward_workers reward_concurrency reward_calls_per_s "
            "reward_batch_size leave leave_within_s connect_timeout_s",
        ),
        "Actors come and go, and each log-prob is that of the engine that sampled the token.",
    ),
    Rule(
        "recorded",
        _of("evaluation", "interval num_prompts group_size temperature pass_reward function"),
        "No training depends on it.",
    ),
    Rule(
        "recorded",
        _of("metrics", "tensorboard wandb_project mlflow_experiment trackio_project bind actor_bind callback routing_interval"),
        "It says what is shown.",
    ),
    Rule("recorded", _of("launch", "num_actors learner_gpus actor_gpus max_restarts"), "A run may have more or fewer actors."),
    Rule("recorded", _of("scale", "actors auto min max max_actor_hours"), "`offbeat set` may change it during the run, too."),
    Rule("refused", _of("launch", "learner_processes"), "The optimizer's state is stored in as many parts."),
    Rule(
        "recorded",
        ("software: offbeat", "software: python", "software: torch", "software: deepspeed", "software: transformers"),
        "A newer version may end a fault. Numbers may change in their last digits.",
    ),
)

OUTCOMES: dict[str, Outcome] = {name: rule.outcome for rule in RULES for name in rule.names}
"""The outcome of each setting and content."""
