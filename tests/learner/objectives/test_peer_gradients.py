"""Gradients of whole losses equal those that other projects' own code gave on the same log-probs.

`peer_gradients.json` holds the inputs and, for each peer and version, the gradient of its aggregated loss with respect to the
policy's log-probs, computed once by its code in float64. Values are not compared: losses with constant weights differ in them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.common.settings.loading import load
from offbeat.learner.objectives.aggregation import aggregate
from offbeat.learner.objectives.objective import PolicyLogprobs, make_objective

RECORDS: dict[str, Any] = json.loads((Path(__file__).parent / "peer_gradients.json").read_text())
INPUTS, GRADIENTS = RECORDS["inputs"], RECORDS["gradients"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_equals_that_of_the_peer(name: str) -> None:
    record = GRADIENTS[name]
    settings = [f"loss.{setting}" for setting in (f"objective={record['objective']}", *record["settings"])]
    objective = make_objective(load(None, ["rollout.max_new_tokens=5", *settings]).loss)
    policy, proximal, behavior = (torch.tensor(INPUTS[of], dtype=torch.float64) for of in ("policy", "proximal", "behavior"))
    mask = torch.tensor(INPUTS["mask"])
    advantages = torch.tensor(INPUTS["advantages"], dtype=torch.float64)[:, None].expand_as(policy)
    policy.requires_grad_()
    logprobs = PolicyLogprobs(policy, behavior, proximal if record["anchor"] == "proximal" else None)
    losses = objective.evaluate(logprobs, mask, advantages).losses
    total = aggregate(losses, mask, torch.ones(len(mask), dtype=torch.float64), mode=objective.aggregation)
    mean = total / objective.denominator(num_groups=1, num_rows=len(mask), num_tokens=int(mask.sum()))
    (gradient,) = torch.autograd.grad(mean, policy)
    torch.testing.assert_close(gradient, torch.tensor(record["gradient"], dtype=torch.float64), rtol=0, atol=1e-8)
