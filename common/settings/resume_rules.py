"""Rules of resuming a run: the outcome of a difference, for each setting and each content of a run.

A difference is refused where the run would not be the same any more: the kept groups, the weights and the numbers belong to
one policy, to these prompts and to this objective. It is recorded where it only changes how the run goes on. `run_identity` of
the learner applies the rules, and `docs/resuming.md` is generated from them.
"""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

Outcome = Literal["refused", "recorded", "ignored"]


class Rule(NamedTuple):
    """The outcome of a difference in any of these names."""

    outcome: Outcome
    names: tuple[str, ...]
    """Settings, or contents (`SETTING: CONTENT`, `software: PACKAGE`)."""
    why: str


# A rule is `outcome | names | why`. Names are `section: setting setting`, or `setting setting / content, content`.
_TABLE = """
ignored | run: resume grace_s | It only says how the run ends and continues.
ignored | hub: address bind | Each start logs its address, and `offbeat train` replaces port 0 with another port each time.
recorded | run: dir mirror | A run's folder may be moved.
recorded | run: max_failed_leases no_actor_timeout_s no_group_timeout_s | It only decides when to give the run up.
refused | run: seed | The order of the prompts follows from it.
refused | model.path / config, weight files, tokenizer, chat template
    | The weights come from this model, and kept groups are tokens of this tokenizer.
recorded | model: path max_length | The contents of the model folder are compared. The length is only a limit.
refused | model: dtype | The checkpoint is stored in it, and the log-probs are computed in it.
refused | data.train_data / prompts
    | Kept groups are completions of these prompts: their tokens, their rows with the answers, their weights, their order.
    Prompts after the last one are recorded if `data.appended_data` allows them.
recorded | data: train_data train_split appended_data max_prompt_tokens long_prompts | The prompts themselves are compared.
refused | data: prompt_field image_field weight_field system_prompt system_prompt_field chat_template template_arguments
    template_arguments_field
    | It decides how rows become prompts and weights.
recorded | data: task_field
    | It only affects reported numbers. With `data.curriculum`, every task that has a share must still exist.
recorded | data: curriculum | The log has the shares so far. Only later shares depend on the function.
recorded | data: eval_data eval_split | No training depends on it.
recorded | data.eval_data / prompts | No training depends on them; evaluations before and after differ.
refused | task: environment reward reward_weights | Kept groups were made with the other function.
recorded | data.train_data data.curriculum task.environment task.reward reward.length_penalty loss.function loss.correction
    advantage.function evaluation.function / source files
    | You may correct a mistake in it. Kept groups keep their rewards, and the prompts themselves are compared.
recorded | task: reward_timeout_s reward_retry_s | It only limits a waiting time.
recorded | environment: workers turn_timeout_s episode_timeout_s max_retries
    | It only decides when an episode is retried or given up.
recorded | environment: python requirements | It only decides where the environment runs.
refused | environment: tool_parser reasoning_parser sampling identical_requests arguments | Kept groups were generated with it.
refused | judge: model options | Kept groups have rewards from the other judge.
recorded | judge: url key_env max_concurrent requests_per_minute timeout_s max_retries budget_tokens cache
    | It decides how the judge is called, not which judge it is.
refused | rollout: group_size max_new_tokens temperature | Kept groups, and leases that actors still hold, were sampled with it.
recorded | rollout: lease_timeout_s | It only decides when a lease is given up.
recorded | staleness: max_staleness target staleness_policy hard_max_staleness lag_of auto
    | `offbeat set` may change it during the run, too.
refused | reward: overlong_buffer overlong_penalty length_penalty norm_mean norm_std clip | It is part of the objective.
refused | advantage: function baseline turns divide_by_std whiten clip gamma gae_lambda
    | It is part of the objective, and decides whether the checkpoint has a critic.
recorded | loss: clip_low clip_high | `offbeat set` may change it during the run, too.
recorded | loss: clip_by | It widens and narrows the clip range, as `loss.clip_low` does.
recorded | loss: noise_floor | It only affects reported numbers and the range of `clip_by = "own_length"`.
recorded | loss.noise_floor / file | It only affects reported numbers and the range of `clip_by = "own_length"`.
refused | loss: objective function anchor routing_replay dual_clip correction normalize_correction aggregation
    aggregation_length entropy_coef zero_variance
    | It is part of the objective.
refused | kl: estimator loss_coef unbiased reward_coef target reference; kl.reference / weight files
    | It is part of the objective.
refused | critic: loss_coef value_clip target_lambda | It is part of the objective.
refused | critic: trunk freeze_attention | The checkpoint holds the weights and the optimizer of such a critic.
recorded | critic: updates_per_step learning_rate_factor alone_until | It decides how fast the critic learns from now on.
refused | lora: rank alpha target_modules | The checkpoint holds an adapter of this shape.
recorded | train: num_steps | A run may be given more steps. A decaying schedule is stretched.
recorded | train: learning_rate | `offbeat set` may change it during the run, too.
recorded | train: lr_schedule warmup_steps on_policy_ess max_grad_norm | It decides how large the remaining steps are.
refused | train: weight_decay adam_betas | The checkpoint's optimizer contains it, and would keep its own value.
refused | train: groups_per_step steps_per_batch epochs_per_batch | Each step would train on a different set of groups.
refused | train: fp32_head | The log-probs are computed with it.
refused | train: zero_stage deepspeed | The optimizer's state is stored in a form that depends on it.
recorded | train: micro_batch_tokens sequence_parallel_size activation_checkpointing | It only trades memory for time.
recorded | train: compile | Compiled layers round differently, within a dtype's precision.
recorded | train: checkpoint_interval keep_checkpoints | It only decides what is kept.
recorded | hub: key learner_key allowed_keys max_actors dead_after_s max_message_mb
    | It only decides how services find and trust each other.
recorded | log: enabled fsync retain_mb min_free_mb | It only decides how groups are kept.
recorded | weights: backend port pull_port delta on_canary_mismatch canary_tolerance bucket_mb timeout_s interval
    | It only decides how weights are sent.
recorded | actor: name engine engine_options max_inflight_groups on_update reward_workers reward_concurrency reward_calls_per_s
    reward_batch_size leave leave_within_s connect_timeout_s
    | Actors come and go, and each log-prob is that of the engine that sampled the token.
recorded | evaluation: interval num_prompts group_size temperature pass_reward function | No training depends on it.
recorded | metrics: tensorboard wandb_project mlflow_experiment trackio_project bind actor_bind callback routing_interval
    | It only decides what is reported, and where.
recorded | launch: num_actors learner_gpus actor_gpus gpu_sharing max_restarts | A run may have more or fewer actors.
recorded | scale: actors auto min max max_actor_hours | `offbeat set` may change it during the run, too.
refused | launch: learner_processes | The optimizer's state is stored in one part for each process.
recorded | software / offbeat, python, torch, deepspeed, transformers
    | A newer version may fix a fault. Results may change in their last digits.
"""


def _rules(table: str) -> Iterator[Rule]:
    for line in re.sub(r"\n +", " ", table).strip().splitlines():
        outcome, names, why = line.split(" | ")
        yield Rule(cast(Outcome, outcome), tuple(_names(names)), why)


def _names(text: str) -> Iterator[str]:
    for group in text.split("; "):
        if " / " in group:
            subjects, _, contents = group.partition(" / ")
            yield from (f"{subject}: {content}" for subject in subjects.split() for content in contents.split(", "))
        else:
            section, _, keys = group.partition(": ")
            yield from (f"{section}.{key}" for key in keys.split())


RULES = tuple(_rules(_TABLE))
OUTCOMES: dict[str, Outcome] = {name: rule.outcome for rule in RULES for name in rule.names}
"""The outcome of each setting and content."""
