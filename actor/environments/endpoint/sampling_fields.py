"""Fields of requests that would change what is sampled: refused, or ignored where the run says so.

The learner needs the log-probs of the policy that sampled each token. A request with another temperature, a penalty or a
grammar would sample from another policy than the one that is trained.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from offbeat.actor.environments.endpoint.calls import Dialect, Refused

SETTING = "environment.sampling"
_SHOWN = 80
"""Longest value in an error, in characters."""


class Rule(NamedTuple):
    """Values under which a field changes nothing, and what to do about others."""

    neutral: tuple[object, ...]
    cure: str


_LEAVE_OUT = "Leave it out."
_CUT = "truncated sampling is not the policy that is trained"
_FORM = "Ask for the form in the prompt, and check it in the function that gives the reward."
_RULES = {
    "top_p": Rule((1,), f"{_LEAVE_OUT} Only 1 is allowed: {_CUT}."),
    "top_k": Rule((-1, 0), f"{_LEAVE_OUT} Only -1 is allowed: {_CUT}."),
    "min_p": Rule((0,), f"{_LEAVE_OUT} Only 0 is allowed: {_CUT}."),
    "n": Rule((1,), "Ask once for each turn; the run samples rollout.group_size episodes of each row."),
    "seed": Rule((), f"{_LEAVE_OUT} Turns of a group must differ."),
    "logit_bias": Rule(({},), _LEAVE_OUT),
    "frequency_penalty": Rule((0,), _LEAVE_OUT),
    "presence_penalty": Rule((0,), _LEAVE_OUT),
    "repetition_penalty": Rule((1,), _LEAVE_OUT),
    "response_format": Rule(({"type": "text"},), _FORM),
    "output_config": Rule((), _FORM),
    "text": Rule((), _FORM),
    "stop": Rule(([], ""), "Cut the text in the agent; sampling stops at the end of a turn."),
    "stop_sequences": Rule(([],), "Cut the text in the agent; sampling stops at the end of a turn."),
    "tool_choice": Rule(("auto",), "Use auto: a forced call is not the model's own choice. Without a choice, give no tools."),
    "logprobs": Rule((False,), "Agents do not see log-probs; the actor keeps them."),
    "top_logprobs": Rule((0,), "Agents do not see log-probs; the actor keeps them."),
    "functions": Rule(([],), "Give tools instead."),
    "function_call": Rule(("auto", "none"), "Give tools instead."),
    "modalities": Rule((["text"],), "The model writes text only."),
    "audio": Rule((), "The model writes text only."),
}


def check(body: Mapping[str, Any], dialect: Dialect, *, temperature: float, ignores: bool) -> list[str]:
    """Return the fields that are ignored; raise `Refused` at the first one that must not be there.

    Args:
        temperature: The run's; the only one that is allowed.
        ignores: Ignore such fields instead (`environment.sampling = "override"`).
    """
    ignored: list[str] = []
    for name, value in body.items():
        if name in dialect.harmless or value is None:
            continue
        if name == "temperature":
            rule = Rule((temperature,), f"Leave it out, or set it to {temperature:g} (rollout.temperature).")
        else:
            rule = _RULES.get(name, Rule((), "Leave it out: this field is not known here."))
        if _is_neutral(name, value, rule):
            continue
        if not ignores:
            shown = repr(value)
            shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
            cure = f'{rule.cure} Or set {SETTING} = "override" in the run, which ignores such fields.'
            raise Refused(f"{name} = {shown} is refused while the model is trained. {cure}", field=name)
        ignored.append(name)
    return ignored


def _is_neutral(name: str, value: object, rule: Rule) -> bool:
    match name, value:
        case "tool_choice", {"type": "auto"}:
            return True
        case ("text", {"format": {"type": "text"} | None}) | ("output_config", {"format": None}):
            return True
        case (("text" | "output_config"), dict()) if "format" not in value:
            return True
        case _:
            # True equals 1 in Python, and is no number here.
            return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in rule.neutral)
