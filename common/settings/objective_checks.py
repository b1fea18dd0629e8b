"""Checks of the objective's settings: contradictions, settings without effect, and combinations that are easily misread."""

from offbeat.common.errors import SettingError
from offbeat.common.settings.completion import engine_noise, has_engine_noise
from offbeat.common.settings.config import Config
from offbeat.common.settings.corrections import WEIGHING, own_functions, parse_corrections
from offbeat.common.settings.library_options import SETTING
from offbeat.common.settings.objectives import DEFAULTS, RECOMPUTED, defaults_of, parse_objective

_CORRECTED = ("decoupled", "interpolated")
"""Values of `loss.anchor` that leave `pi_old / mu` to `loss.correction`."""


def check_objective(config: Config) -> None:
    """Raise `SettingError` for the first contradiction; `config` is complete (`common.settings.completion`)."""
    _check_ratio(config)
    _check_clip(config)
    _check_correction(config)
    _check_advantage(config)
    _check_reward(config)
    _check_kl(config)
    _check_lora(config)
    _check_routing_replay(config)


def objective_warnings(config: Config) -> list[str]:
    """Return a warning for each combination that is allowed but easily misread in the results."""
    loss = config.loss
    warnings: list[str] = []
    choices = parse_corrections(loss.correction)
    weighs = any(choice.name in WEIGHING for choice in choices)
    is_narrow = False
    if has_engine_noise(loss, defaults_of(loss.objective)) and loss.clip_low is not None and loss.clip_high is not None:
        # At half of it a usual engine's noise alone is beyond the band for a third of the completions.
        is_narrow = min(loss.clip_low, loss.clip_high) < engine_noise(config.rollout.max_new_tokens) / 2
    # A user with a measured noise floor sees in the metrics how much of it the band clips.
    if is_narrow and loss.clip_by == "run" and not loss.noise_floor:
        warnings.append(
            f"loss.clip_low = {loss.clip_low}, loss.clip_high = {loss.clip_high}: against engine log-probs so narrow a band "
            "clips many completions for numerical noise alone; `offbeat calibrate` says how many."
        )
    if loss.objective == "reinforce" and loss.correction == "none":
        warnings.append('loss.objective = "reinforce" has no importance ratio: stale rollouts are trained on as if new.')
    elif loss.anchor == "proximal" and config.train.batch_steps == 1:
        warnings.append(
            'loss.anchor = "proximal" with train.steps_per_batch = 1 and train.epochs_per_batch = 1: nothing has moved at the '
            "one step that is taken, so the clip does nothing and only the objective's weight pi / mu acts."
        )
    elif loss.anchor == "decoupled" and config.train.batch_steps == 1 and loss.objective != "reinforce":
        warnings.append(
            'loss.anchor = "decoupled" with train.steps_per_batch = 1 and train.epochs_per_batch = 1: the ratio is 1 at the '
            "one step that is taken, so the clip does nothing and only loss.correction acts."
        )
    elif loss.anchor == "behavior" and weighs and loss.objective != "reinforce":
        warnings.append(
            f'loss.correction = "{loss.correction}" with loss.anchor = "behavior": pi / mu is in the objective\'s ratio '
            "already and counts twice where it is not clipped or masked."
        )
    if loss.anchor in _CORRECTED and choices and not weighs and not own_functions(loss.correction):
        warnings.append(
            f'loss.correction = "{loss.correction}" with loss.anchor = "{loss.anchor}": what it keeps has the weight 1, so '
            'pi_old / mu of it is not corrected. Add a weight, as in "token_tis + ...", or set loss.anchor="behavior", which '
            "has it in the objective's ratio."
        )
    return warnings


def _check_ratio(config: Config) -> None:
    loss = config.loss
    if loss.anchor in ("proximal", "interpolated") and loss.objective == "reinforce":
        problem = 'loss.objective = "reinforce" has no importance ratio, so nothing would be anchored'
        raise SettingError("loss.anchor", loss.anchor, problem, 'Set loss.anchor="behavior".')
    if loss.anchor == "group":
        _check_group_ratio(config)
    if loss.anchor != "behavior" and parse_objective(loss.objective).name == "m2po":
        problem = 'loss.objective = "m2po" bounds the second moment of pi / mu, and its ratio is pi / mu'
        raise SettingError("loss.anchor", loss.anchor, problem, 'Set loss.anchor="behavior".')
    has_behavior_weight = defaults_of(loss.objective).has_behavior_weight and not loss.function
    if loss.anchor in _CORRECTED and has_behavior_weight:
        problem = f'loss.objective = "{loss.objective}" has pi / mu as its weight already, which contains pi_old / mu'
        cure = 'Set loss.anchor="proximal", or "behavior", and remove loss.correction.'
        raise SettingError("loss.anchor", loss.anchor, problem, cure)
    if loss.anchor == "proximal" and config.train.batch_steps == 1 and not has_behavior_weight:
        raise SettingError(
            "loss.anchor",
            "proximal",
            "with train.steps_per_batch = 1 and train.epochs_per_batch = 1 the proximal policy is the policy itself, so the "
            "importance ratio is always 1 and neither clipping nor staleness correction happens",
            'Set loss.anchor="behavior", or train.steps_per_batch=2 (or train.epochs_per_batch=2) or more, or '
            'loss.anchor="decoupled" with a correction.',
        )
    if loss.anchor in _CORRECTED and loss.correction == "none":
        problem = "pi_old / mu is left out of the loss without a correction for it"
        raise SettingError("loss.anchor", loss.anchor, problem, 'Set loss.correction, for example to "token_tis".')
    if loss.anchor == "proximal" and loss.correction != "none":
        problem = "a proximal anchor with a correction is decoupled"
        raise SettingError("loss.correction", loss.correction, problem, 'Set loss.anchor="decoupled".')


def _check_group_ratio(config: Config) -> None:
    loss = config.loss
    if not defaults_of(loss.objective).is_sequence_ratio or loss.function:
        problem = "a group has one likelihood, which only a ratio of whole completions can be taken to"
        cure = 'Set loss.objective="gspo" without loss.function, or loss.anchor="behavior".'
        raise SettingError("loss.anchor", "group", problem, cure)
    if loss.correction != "none":
        problem = "the ratio to the group's likelihood corrects for staleness already, and so would the correction"
        raise SettingError("loss.correction", loss.correction, problem, 'Remove it, or set loss.anchor="behavior".')


def _check_clip(config: Config) -> None:
    loss = config.loss
    defaults = defaults_of(loss.objective)
    for name, value in (("clip_low", loss.clip_low), ("clip_high", loss.clip_high)):
        if value is not None and loss.function:
            problem = f"loss.function = {loss.function!r} takes the place of the loss that would clip"
            raise SettingError(f"loss.{name}", value, problem, "Remove it, or remove loss.function.")
        if value is not None and defaults.band is None:
            raise SettingError(f"loss.{name}", value, f"loss.objective = {loss.objective!r} does not clip", "Remove it.")
    chosen = parse_objective(loss.objective)
    if loss.function and chosen != parse_objective(chosen.name):
        problem = f"loss.function = {loss.function!r} takes the place of the loss that would read the parameters"
        raise SettingError("loss.objective", loss.objective, problem, f'Write "{chosen.name}", or remove loss.function.')
    if loss.clip_low is not None and loss.clip_low > 1:
        raise SettingError("loss.clip_low", loss.clip_low, "no ratio is below 0", "Set it to 1 for no lower bound.")
    if loss.clip_by == "own_length" and not has_engine_noise(loss, defaults):
        problem = "it is for gspo, gspo_token and luspo with an anchor of engine log-probs, which have noise by length"
        raise SettingError("loss.clip_by", loss.clip_by, problem, 'Remove it, or set loss.anchor="behavior".')
    if loss.dual_clip is not None and not defaults.dual_clip:
        with_it = ", ".join(name for name in DEFAULTS if DEFAULTS[name].dual_clip)
        problem = f"loss.objective = {loss.objective!r} has none (only {with_it})"
        raise SettingError("loss.dual_clip", loss.dual_clip, problem, "Remove it.")
    if loss.aggregation_length is not None and loss.aggregation != "seq-mean-token-sum-norm":
        problem = f"loss.aggregation = {loss.aggregation!r} does not divide by a constant length"
        cure = 'Remove it, or set loss.aggregation="seq-mean-token-sum-norm".'
        raise SettingError("loss.aggregation_length", loss.aggregation_length, problem, cure)


def _check_correction(config: Config) -> None:
    loss = config.loss
    choices = parse_corrections(loss.correction)
    weighing = [choice.name for choice in choices if choice.name in WEIGHING]
    if len(weighing) > 1:
        problem = f"{' and '.join(weighing)} weigh by the same ratio, which would count twice"
        raise SettingError("loss.correction", loss.correction, problem, "Leave one; the others may be masks.")
    if len({choice.name for choice in choices}) < len(choices):
        raise SettingError("loss.correction", loss.correction, "one of them is there twice", "Leave one.")
    if loss.normalize_correction and not weighing:
        problem = f"loss.correction = {loss.correction!r} has no weights to divide"
        raise SettingError("loss.normalize_correction", True, problem, f"Remove it, or add one of {', '.join(WEIGHING)}.")
    if loss.normalize_correction and loss.anchor != "decoupled":
        problem = f"with loss.anchor = {loss.anchor!r} weights change with the policy, so their mean is not known in advance"
        raise SettingError("loss.normalize_correction", True, problem, 'Remove it, or set loss.anchor="decoupled".')


def _check_advantage(config: Config) -> None:
    advantage, kl = config.advantage, config.kl
    of_group = ("group", "leave_one_out", "length_weighted")
    if config.rollout.group_size == 1 and advantage.baseline in of_group:
        problem = (
            f"with advantage.baseline = {advantage.baseline!r} a completion's advantage is its reward minus the mean of its "
            "group, which is 0 for a group of one: nothing would be learned"
        )
        cure = 'Set it to at least 2, or set advantage.baseline="zero" for advantages without a baseline.'
        raise SettingError("rollout.group_size", 1, problem, cure)
    if config.rollout.group_size == 1 and config.reward.norm_mean == "group":
        problem = "with rollout.group_size = 1 a reward minus the mean of its group is 0: nothing would be learned"
        cure = 'Set it to "batch", "running" or "none", or set rollout.group_size to at least 2.'
        raise SettingError("reward.norm_mean", "group", problem, cure)
    if config.rollout.group_size == 1 and config.loss.zero_variance == "drop":
        problem = "with rollout.group_size = 1 the rewards of every group are equal, so every group would be dropped"
        raise SettingError("loss.zero_variance", "drop", problem, 'Set it to "count", or set rollout.group_size to at least 2.')
    if config.critic.trunk == "own" and config.train.sequence_parallel_size > 1:
        problem = (
            f"with {SETTING} = {config.train.sequence_parallel_size} each process has a part of the tokens only, and a second "
            "network is not split that way"
        )
        raise SettingError("critic.trunk", "own", problem, f'Set {SETTING}=1, or critic.trunk="shared".')
    if advantage.function and advantage.baseline == "critic":
        problem = 'advantage.baseline = "critic" takes its advantages from the critic, so the function would not be called'
        raise SettingError("advantage.function", advantage.function, problem, 'Remove it, or set advantage.baseline="group".')
    if advantage.divide_by_std and advantage.baseline not in of_group:
        problem = f"advantage.baseline = {advantage.baseline!r} takes no group's moments"
        cure = "Remove it; advantage.whiten scales the advantages of the whole step."
        raise SettingError("advantage.divide_by_std", True, problem, cure)
    if advantage.turns != "sum":
        _check_turns(config)
    varies = {
        'advantage.baseline = "critic"': advantage.baseline == "critic",
        f'advantage.turns = "{advantage.turns}"': advantage.turns != "sum",
        f"kl.reward_coef = {kl.reward_coef}": kl.reward_coef > 0,
    }
    if defaults_of(config.loss.objective).shares_advantage and any(varies.values()):
        problem = f"it has one advantage for a completion, and with {next(filter(varies.get, varies))} tokens have their own"
        raise SettingError("loss.objective", config.loss.objective, problem, 'Set loss.objective="gspo_token".')


def _check_turns(config: Config) -> None:
    """Raise `SettingError` for settings that contradict advantages of turns."""
    advantage, reward = config.advantage, config.reward
    others_units = "subtracts rewards of other turns from the episode's, which would be in other units"
    clashes = (
        ("advantage.baseline", advantage.baseline, advantage.baseline == "critic", "compares turns, without a critic"),
        (
            "advantage.baseline",
            advantage.baseline,
            advantage.baseline == "length_weighted",
            "compares turns, and not whole completions by their length",
        ),
        ("advantage.function", advantage.function, bool(advantage.function), "would not call it: it does not support turns"),
        (
            "advantage.divide_by_std",
            True,
            bool(advantage.divide_by_std),
            "would make a turn of small rewards as loud as others",
        ),
        ("reward.norm_std", reward.norm_std, reward.norm_std != "none", others_units),
        ("reward.clip", reward.clip, reward.clip is not None, others_units),
    )
    for setting, value, is_set, problem in clashes:
        if is_set:
            cure = 'Set it to "group"' if setting == "advantage.baseline" else "Remove it"
            raise SettingError(
                setting, value, f'advantage.turns = "{advantage.turns}" {problem}', f'{cure}, or set advantage.turns="sum".'
            )


def _check_reward(config: Config) -> None:
    reward, rollout = config.reward, config.rollout
    if reward.overlong_buffer is not None and reward.overlong_buffer >= rollout.max_new_tokens:
        problem = f"every completion would be overlong with rollout.max_new_tokens = {rollout.max_new_tokens}"
        raise SettingError("reward.overlong_buffer", reward.overlong_buffer, problem, f"Set it below {rollout.max_new_tokens}.")


def _check_kl(config: Config) -> None:
    kl = config.kl
    if kl.loss_coef and kl.estimator == "k1" and not kl.unbiased:
        problem = "as a loss its expected gradient is 0: it would be noise"
        raise SettingError("kl.estimator", "k1", problem, 'Set kl.estimator="k3", or kl.unbiased=true, or use kl.reward_coef.')
    if kl.unbiased and not kl.loss_coef:
        raise SettingError("kl.unbiased", True, "there is no KL in the loss", "Set kl.loss_coef, or remove it.")
    if kl.reference and not (kl.loss_coef or kl.reward_coef):
        raise SettingError("kl.reference", kl.reference, "nothing uses it", "Set kl.loss_coef or kl.reward_coef, or remove it.")
    if kl.target is not None and bool(kl.loss_coef) == bool(kl.reward_coef):
        problem = "it adapts one coefficient"
        raise SettingError("kl.target", kl.target, problem, "Set exactly one of kl.loss_coef and kl.reward_coef above 0.")


def _check_lora(config: Config) -> None:
    lora = config.lora
    if lora.target_modules and not lora.rank:
        raise SettingError("lora.target_modules", lora.target_modules, "lora.rank = 0", "Set lora.rank, or remove it.")
    if lora.rank and config.train.zero_stage == 3:
        problem = "the adapter is merged into whole weights, which stage 3 has not"
        raise SettingError("train.zero_stage", 3, problem, "Set it to 2 or less.")


def _check_routing_replay(config: Config) -> None:
    loss, data, task = config.loss, config.data, config.task
    if loss.routing_replay == "off":
        return
    if loss.routing_replay == "recomputed" and loss.anchor not in RECOMPUTED:
        problem = f'loss.anchor = "{loss.anchor}" recomputes nothing before the update, so there is no routing to replay'
        cure = 'Set loss.anchor="proximal" or "decoupled", or loss.routing_replay="off".'
        raise SettingError("loss.routing_replay", "recomputed", problem, cure)
    if config.train.sequence_parallel_size > 1:
        problem = f"with {SETTING} = {config.train.sequence_parallel_size} each process runs a part of the tokens only"
        cure = f'Set {SETTING}=1, or loss.routing_replay="off".'
        raise SettingError("loss.routing_replay", loss.routing_replay, problem, cure)
    in_the_way = "task.environment" if task.environment else "data.image_field" if data.image_field else ""
    if loss.routing_replay == "sampled" and in_the_way:
        raise SettingError(
            "loss.routing_replay",
            "sampled",
            f"with {in_the_way} the engine's experts are not recorded: they are those of prompts of text and their completions",
            'Set loss.routing_replay="recomputed" or "off".',
        )
