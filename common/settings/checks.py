"""Checks of settings against each other: contradictions are refused before anything starts, with the reason and the cure."""

import math
import re
from functools import partial
from pathlib import Path

from offbeat.common.errors import SettingError, collect_errors
from offbeat.common.models.images import MAX_PROMPT_BYTES
from offbeat.common.settings.config import Config, HubSection
from offbeat.common.settings.inert import check_inert
from offbeat.common.settings.judge_checks import check_judge
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.common.settings.library_options import check_deepspeed_options, deepspeed_warnings
from offbeat.common.settings.objective_checks import check_objective, objective_warnings
from offbeat.protocols.addresses import address_file, host_of, is_loopback
from offbeat.protocols.messages import HEARTBEAT_S

_LOW_LEARNING_RATE = 1e-12
_HIGH_LEARNING_RATE = 0.03
_HIGH_TEMPERATURE = 3.0
_LOW_TEMPERATURE = 0.01
"""vLLM raises lower ones to this one, except for 0."""
_ANY_HOST = {"0.0.0.0", "::"}
BYTES_PER_TOKEN = 8
"""Size of a token on the wire: an int32 token id and a float32 log-prob."""


def check(config: Config) -> list[str]:
    """Raise `SettingError` for the contradictions; return warnings about valid settings that are probably not meant."""
    checks = (
        *(_check_lengths, check_objective, _check_staleness, _check_steps, _check_data, _check_images),
        *(_check_leases, _check_compile, _check_hub, _check_ports, _check_launch, _check_gpus, _check_scale, _check_run_name),
        *(_check_mirror, _check_temperatures),
        check_judge,
    )
    collect_errors([*(partial(check, config) for check in checks), partial(check_deepspeed_options, config.train)])
    return _warnings(config)


def check_before_run(config: Config) -> list[str]:
    """Do the same as `check`, and raise `SettingError` for settings without effect too, except in a run that is resumed.

    A resumed run must have the settings that it began with, so they could not be removed.
    """
    if config.run.resume:
        return check(config)
    warnings: list[str] = []
    collect_errors([lambda: warnings.extend(check(config)), partial(check_inert, config)])
    return warnings


def least_staleness(config: Config) -> int:
    """Return the smallest `staleness.max_staleness` with which the run does not wait forever."""
    return config.train.batch_steps - 1 + steps_behind(config.weights.interval, config.train.batch_steps)


def steps_behind(weights_interval: int, batch_steps: int) -> int:
    """Return the greatest age of the newest published weights at the start of a batch, in optimizer steps."""
    # Weights are sent after whole batches, at least `weights.interval` steps apart.
    return (math.ceil(weights_interval / batch_steps) - 1) * batch_steps


def _check_lengths(config: Config) -> None:
    model, data, rollout = config.model, config.data, config.rollout
    total = data.max_prompt_tokens + rollout.max_new_tokens
    if total > model.max_length:
        problem = (
            "it is too small for a prompt and its completion: data.max_prompt_tokens + rollout.max_new_tokens = "
            f"{data.max_prompt_tokens} + {rollout.max_new_tokens} = {total}"
        )
        cure = f"Lower one of the two, or set model.max_length={total}."
        raise SettingError("model.max_length", model.max_length, problem, cure)
    group_mb = math.ceil(rollout.group_size * total * BYTES_PER_TOKEN / 2**20)
    if group_mb > config.hub.max_message_mb:
        raise SettingError(
            "hub.max_message_mb",
            config.hub.max_message_mb,
            f"a group of {rollout.group_size} completions of {total} tokens takes up to {group_mb} MB and would be refused",
            f"Set hub.max_message_mb={group_mb + 1} or more.",
        )


def _check_staleness(config: Config) -> None:
    staleness, train, interval = config.staleness, config.train, config.weights.interval
    # The last groups of a batch of k steps are trained on k - 1 steps after it starts.
    least, batch_steps = least_staleness(config), train.batch_steps
    behind = steps_behind(interval, batch_steps)
    if staleness.max_staleness < least:
        problem = (
            f"the run would wait forever. With {_steps_of_batch(train)}, the last step on the groups of a batch is taken "
            f"{batch_steps - 1} steps after its start, and with weights.interval = {interval} the groups may be generated "
            f"under weights {behind} steps old, so the smallest possible bound is {batch_steps - 1} + {behind} = {least}"
        )
        cure = f"Set staleness.max_staleness={least} or more, or lower those settings."
        raise SettingError("staleness.max_staleness", staleness.max_staleness, problem, cure)
    hard = staleness.hard_max_staleness
    if hard is not None and hard < staleness.max_staleness:
        problem = (
            f"it is below staleness.max_staleness = {staleness.max_staleness}: groups between the two would be generated "
            "only to be dropped"
        )
        cure = f"Set it to {staleness.max_staleness} or more, or leave it out to drop nothing."
        raise SettingError("staleness.hard_max_staleness", hard, problem, cure)
    if hard is not None and staleness.staleness_policy != "gate":
        problem = (
            f"staleness.staleness_policy = {staleness.staleness_policy!r} drops every group that exceeds max_staleness = "
            f"{staleness.max_staleness} already"
        )
        cure = 'Remove it, or set staleness.staleness_policy="gate".'
        raise SettingError("staleness.hard_max_staleness", hard, problem, cure)
    if staleness.auto and hard is None:
        cure = 'Set staleness.hard_max_staleness, which needs staleness.staleness_policy="gate".'
        raise SettingError("staleness.auto", True, "no setting says how far the bound may rise", cure)
    if staleness.staleness_policy == "abort" and staleness.lag_of != "oldest_token":
        problem = (
            "by that measure a group grows younger with each token it generates under new weights, so the policy abort would "
            "never abort one"
        )
        cure = 'Set staleness.staleness_policy="drop", or staleness.lag_of="oldest_token".'
        raise SettingError("staleness.lag_of", staleness.lag_of, problem, cure)


def _check_steps(config: Config) -> None:
    train, batch_steps = config.train, config.train.batch_steps
    if train.num_steps % batch_steps:
        problem = f"it is not a multiple of {_steps_of_batch(train)}, so the last batch would not be complete"
        cure = f"Set it to {train.num_steps - train.num_steps % batch_steps + batch_steps}."
        raise SettingError("train.num_steps", train.num_steps, problem, cure)
    if train.warmup_steps > train.num_steps:
        problem = f"the warm-up is longer than the run, train.num_steps = {train.num_steps}"
        raise SettingError("train.warmup_steps", train.warmup_steps, problem, f"Set it to {train.num_steps} or less.")
    alone_until = config.critic.alone_until
    if alone_until >= train.num_steps:
        problem = f"the policy would never learn: the run ends at train.num_steps = {train.num_steps}"
        raise SettingError("critic.alone_until", alone_until, problem, f"Set it below {train.num_steps}.")
    if 1.0 in train.adam_betas:
        problem = "an average with decay 1 never changes"
        raise SettingError("train.adam_betas", train.adam_betas, problem, "Give two numbers below 1.")


def _steps_of_batch(train: TrainSection) -> str:
    """Return the number of optimizer steps on one selection as a product of settings."""
    steps = f"train.steps_per_batch = {train.steps_per_batch}"
    epochs = train.epochs_per_batch
    return steps if epochs == 1 else f"{steps} times train.epochs_per_batch = {epochs}"


def compile_obstacle(config: Config) -> str | None:
    """Return the reason for which the decoder layers cannot be compiled with these settings; None if there is none."""
    if config.model.dtype == "float32":
        return 'with model.dtype = "float32" packed attention has a call for each length, which cannot be compiled once'
    if config.train.zero_stage == 3:
        return "with train.zero_stage = 3 weights are gathered in hooks between the parts of a layer"
    if config.data.image_field:
        return "with data.image_field packs with and without images would differ in every layer's arguments"
    size = config.train.sequence_parallel_size
    return f"with train.sequence_parallel_size = {size} processes exchange tokens in a layer" if size > 1 else None


def _check_compile(config: Config) -> None:
    obstacle = compile_obstacle(config)
    if config.train.compile == "on" and obstacle is not None:
        raise SettingError("train.compile", "on", obstacle, 'Set it to "auto" or "off".')


def _check_data(config: Config) -> None:
    data = config.data
    if not config.model.path:
        raise SettingError("model.path", "", "no model is given", "Set it to a model folder or a hub name.")
    if not data.train_data:
        raise SettingError("data.train_data", "", "no data is given", "Set it to a JSONL file or a dataset's name.")
    if config.evaluation.interval and not data.eval_data:
        cure = "Set data.eval_data, or evaluation.interval=0."
        raise SettingError("evaluation.interval", config.evaluation.interval, "there are no prompts to evaluate on", cure)
    if config.evaluation.function and not config.evaluation.interval:
        cure = "Set evaluation.interval and data.eval_data, or remove it."
        raise SettingError("evaluation.function", config.evaluation.function, "there is no evaluation", cure)
    if data.curriculum and not data.task_field:
        problem = "no field names the task of a row"
        raise SettingError("data.curriculum", data.curriculum, problem, "Set data.task_field, or remove it.")
    for key in ("system_prompt", "system_prompt_field", "template_arguments", "template_arguments_field"):
        if getattr(data, key) and not data.chat_template:
            problem = "it is only used with the chat template"
            raise SettingError(f"data.{key}", getattr(data, key), problem, "Set data.chat_template=true, or remove it.")


def _check_images(config: Config) -> None:
    """Refuse what prompts with images cannot be combined with yet."""
    if not config.data.image_field:
        return
    size, least_mb = config.train.sequence_parallel_size, (MAX_PROMPT_BYTES >> 20) + 1
    cure = "Remove it, or data.image_field."
    for setting, value, is_refused, problem in (
        ("task.environment", config.task.environment, True, "the prompts of episodes cannot have images"),
        ("lora.rank", config.lora.rank, True, "with images the whole model is trained"),
        ("train.sequence_parallel_size", size, size > 1, "processes cannot share a pack that has images"),
        ("actor.engine", config.actor.engine, config.actor.engine == "transformers", "only vLLM takes images"),
    ):
        if value and is_refused:
            raise SettingError(setting, value, problem, cure)
    if config.hub.max_message_mb < least_mb:
        problem = f"the images of a prompt may have {least_mb - 1} MB"
        raise SettingError("hub.max_message_mb", config.hub.max_message_mb, problem, f"Set it to {least_mb} or more.")


def _check_leases(config: Config) -> None:
    lease_s, limits = config.rollout.lease_timeout_s, config.environment
    if config.task.environment and lease_s <= limits.episode_timeout_s:
        problem = f"a lease would expire before its episodes: environment.episode_timeout_s = {limits.episode_timeout_s:g}"
        # Without retries too, a lease takes longer than its episodes: they wait for the engine, and their group for the wire.
        needed_s = limits.episode_timeout_s * max(2, 1 + limits.max_retries)
        cure = f"Set it to {needed_s:g}, with time for every retry, or lower environment.episode_timeout_s."
        raise SettingError("rollout.lease_timeout_s", lease_s, problem, cure)
    reward_s = config.task.reward_timeout_s
    if lease_s < reward_s:
        raise SettingError(
            "rollout.lease_timeout_s",
            lease_s,
            f"a lease would expire while the rewards of its group may still be computed: task.reward_timeout_s = {reward_s}",
            "Set it well above that, or lower task.reward_timeout_s.",
        )


def _check_hub(config: Config) -> None:
    hub = config.hub
    if hub.dead_after_s <= HEARTBEAT_S:
        problem = f"actors send a heartbeat every {HEARTBEAT_S:g} s, so every peer would count as dead between two heartbeats"
        cure = f"Set it to several heartbeats: {5 * HEARTBEAT_S:g} or more."
        raise SettingError("hub.dead_after_s", hub.dead_after_s, problem, cure)
    keys = {"key": hub.key, "learner_key": hub.learner_key, "allowed_keys": hub.allowed_keys}
    for name, path in keys.items():
        if not path and any(keys.values()):
            given = [f"hub.{other}" for other in keys if keys[other]]
            are_set = f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} set"
            problem = f"{are_set}, and encryption needs hub.key, hub.learner_key and hub.allowed_keys together"
            raise SettingError(f"hub.{name}", "", problem, "Set it too (`offbeat keygen` says how), or remove the others.")
    if address_file(hub.address) is not None and not hub.bind:
        problem = f"hub.address = {hub.address!r} is a file, into which the learner writes the address that it binds"
        cure = 'Set it to the address to bind, with port 0 for any free one: "tcp://*:0".'
        raise SettingError("hub.bind", hub.bind, problem, cure)
    for name, address in (("address", hub.address), ("bind", hub.bind)):
        is_given = bool(address) if name == "bind" else address_file(address) is None
        if is_given and not _is_loopback(f"hub.{name}", address) and not hub.key:
            problem = "other machines can reach the address, and without keys traffic is neither encrypted nor authenticated"
            cure = "Make keys with `offbeat keygen keys ACTOR...`, which says what to set; or use tcp://127.0.0.1:PORT."
            raise SettingError(f"hub.{name}", address, problem, cure)
    if hub.bind and address_file(hub.address) is None:
        _check_free_port(hub)


def _check_free_port(hub: HubSection) -> None:
    """Refuse a free port that the learner binds and the actors do not learn of, or the other way round."""
    if hub.bind.endswith(":0"):
        problem = f"the learner would bind any free port, and is looked for at {hub.address}"
        raise SettingError("hub.bind", hub.bind, problem, "Give it the port of hub.address, or make hub.address a file.")
    if hub.address.endswith(":0"):
        problem = f"hub.bind has a port, {hub.bind}, and actors would look for the learner at another, any free one"
        raise SettingError("hub.address", hub.address, problem, "Give it the port of hub.bind, or remove hub.bind.")


def _is_loopback(setting: str, address: str) -> bool:
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    if match is None or int(match[2]) > 65535:
        problem = "this is not an address"
        raise SettingError(setting, address, problem, "Write tcp://HOST:PORT, for example tcp://127.0.0.1:5700.")
    return is_loopback(address)


def _check_ports(config: Config) -> None:
    """Refuse ports that two listeners of the learner would share."""
    hub, page = config.hub.bind or config.hub.address, config.metrics.bind
    listeners: dict[str, str | int] = {"hub.address": hub, "weights.port": config.weights.port}
    listeners["weights.pull_port"] = config.weights.pull_port
    # The page may have an address of its own; the others listen at the hub's.
    hosts = {host_of(page), host_of(hub)}
    if len(hosts) == 1 or hosts & _ANY_HOST:
        listeners["metrics.bind"] = page
    taken: dict[str, str] = {}
    for setting, value in listeners.items():
        port = str(value).rpartition(":")[2]
        if port != "0" and port in taken:
            problem = f"{taken[port]} has the same port"
            raise SettingError(setting, value, problem, "Give each its own port, or 0 for any free port.")
        taken[port] = setting


def _check_run_name(config: Config) -> None:
    folder = config.run.dir
    if not folder.strip():
        raise SettingError("run.dir", folder, "no folder is given", 'Name one, for example "runs/{time}".')
    placeholder = re.search(r"\{\w*\}", folder)
    if placeholder is not None and placeholder[0] != "{time}":
        raise SettingError("run.dir", folder, f"{placeholder[0]} is not a placeholder", "Write {time} for the start time.")


def _check_mirror(config: Config) -> None:
    folder, mirror = Path(config.run.dir).absolute(), config.run.mirror
    if mirror and "://" not in mirror and Path(mirror).expanduser().absolute().is_relative_to(folder):
        problem = "it lies in run.dir, and would be lost with it"
        raise SettingError("run.mirror", mirror, problem, "Name a folder elsewhere, best on another disk.")


def _check_temperatures(config: Config) -> None:
    for setting, value in (("rollout", config.rollout.temperature), ("evaluation", config.evaluation.temperature)):
        if 0 < value < _LOW_TEMPERATURE:
            problem = f"vLLM samples at {_LOW_TEMPERATURE:g} instead, so its log-probs would not be those of the setting"
            raise SettingError(f"{setting}.temperature", value, problem, f"Give {_LOW_TEMPERATURE:g} or more.")


def _check_launch(config: Config) -> None:
    launch, scale = config.launch, config.scale
    numbers = {
        "launch.num_actors": launch.num_actors,
        "scale.actors": scale.actors,
        "scale.max": scale.max if scale.auto else None,
    }
    for setting, number in numbers.items():
        if number is not None and number > config.hub.max_actors:
            problem = f"the learner would refuse some of them: hub.max_actors = {config.hub.max_actors}"
            raise SettingError(setting, number, problem, "Lower it, or raise hub.max_actors.")
    if launch.actor_gpus and len(launch.actor_gpus) != launch.num_actors:
        problem = f"it has {len(launch.actor_gpus)} entries for launch.num_actors = {launch.num_actors}"
        cure = "Give one list of GPUs per actor, or leave it empty."
        raise SettingError("launch.actor_gpus", launch.actor_gpus, problem, cure)
    size = config.actor.engine_options.get("tensor_parallel_size", 1)
    for gpus in launch.actor_gpus:
        if len(gpus) != size:
            problem = f"an actor has {len(gpus)} GPUs, and actor.engine_options.tensor_parallel_size is {size}"
            cure = "Give each actor that many GPUs, or set the option to their number."
            raise SettingError("launch.actor_gpus", launch.actor_gpus, problem, cure)
    if launch.learner_gpus and len(launch.learner_gpus) != launch.learner_processes:
        problem = f"it has {len(launch.learner_gpus)} entries for launch.learner_processes = {launch.learner_processes}"
        cure = "Give one GPU per learner process, or leave it empty."
        raise SettingError("launch.learner_gpus", launch.learner_gpus, problem, cure)


def _check_scale(config: Config) -> None:
    scale = config.scale
    if scale.auto and scale.min > scale.max:
        raise SettingError("scale.min", scale.min, f"it exceeds scale.max = {scale.max}", "Lower it, or raise scale.max.")


def _check_gpus(config: Config) -> None:
    """Refuse a GPU that two learner processes, or one actor twice, would use."""
    launch = config.launch
    for setting, gpus in (("learner_gpus", launch.learner_gpus), *(("actor_gpus", gpus) for gpus in launch.actor_gpus)):
        twice = [gpu for gpu in set(gpus) if gpus.count(gpu) > 1]
        if twice or any(gpu < 0 for gpu in gpus):
            problem = f"GPU {twice[0]} is there twice" if twice else "an index is below 0"
            raise SettingError(f"launch.{setting}", gpus, problem, "Give each process its own GPU, counted from 0.")


def _warnings(config: Config) -> list[str]:
    warnings = [*objective_warnings(config), *deepspeed_warnings(config.train)]
    train, ranks = config.train, config.launch.learner_processes
    size, groups = train.sequence_parallel_size, train.groups_per_step
    if groups % max(1, ranks // size):
        shared = "" if size == 1 else f" / train.sequence_parallel_size = {size}"
        warnings.append(
            f"train.groups_per_step = {groups} is not a multiple of launch.learner_processes = {ranks}{shared}: some ranks "
            "wait for others in each step."
        )
    evaluation = config.evaluation
    if config.data.eval_data and not evaluation.interval:
        warnings.append(
            "evaluation.interval = 0: nothing is evaluated on data.eval_data. Set evaluation.interval, for example to 20."
        )
    if evaluation.interval and evaluation.temperature == 0 and evaluation.group_size > 1:
        warnings.append(
            f"evaluation.group_size = {evaluation.group_size}: greedy completions of one prompt are all equal; set "
            "evaluation.temperature above 0, or evaluation.group_size=1."
        )
    if config.task.environment and config.staleness.staleness_policy == "abort":
        warnings.append(
            'staleness.staleness_policy = "abort" cancels episodes whose tools are slow, and begins them again: long ones may '
            'never reach a batch. Use "gate", and a bound for which they are short.'
        )
    for setting, value in (("rollout", config.rollout.temperature), ("evaluation", evaluation.temperature)):
        if value > _HIGH_TEMPERATURE:
            warnings.append(
                f"{setting}.temperature = {value:g}: above {_HIGH_TEMPERATURE:g} nearly every token is likely to be sampled, "
                "whatever the model has learned. Language models are sampled at 0.6 to 1.2."
            )
    if config.train.learning_rate < _LOW_LEARNING_RATE:
        warnings.append(
            f"train.learning_rate = {config.train.learning_rate:g}: AdamW moves every weight by about that much in each step, "
            "which rounding takes away: nothing will change. Language models are trained with 1e-7 to 1e-3."
        )
    if config.train.learning_rate > _HIGH_LEARNING_RATE:
        warnings.append(
            f"train.learning_rate = {config.train.learning_rate:g}: AdamW moves every weight by about that much in each step, "
            "and language models are trained with 1e-7 to 1e-3. Such a run will most likely break its model at the first steps."
        )
    return warnings
