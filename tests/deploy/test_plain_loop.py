"""With a bound of 0 the asynchronous services are the plain loop: sample, score, one step on the mean loss, and again.

`plain_loop` is that loop in torch and transformers alone, for a reader to check. It takes the sampled tokens and their rewards
from the run's log, and everything else from its own weights.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.common.records.run_folder import LOG
from offbeat.common.settings.loading import load
from offbeat.lab.gradients import load_candidates
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.log_reading import read_log
from tests.deploy.services import SERVICES_S, Services, write_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(SERVICES_S)]

NUM_STEPS, GROUPS_PER_STEP, LEARNING_RATE = 10, 4, 1e-3


class TokenSurprise(NamedTuple):
    """The log-probs of a run's tokens under the weights of the plain loop's step, and what sampling from them would give."""

    largest_difference: float
    """Largest distance of a recorded log-prob from that of the plain loop's own weights."""
    z_score: float
    """Sum of `log p(token) + entropy` over its standard deviation: standard normal if the tokens were drawn from p."""


def plain_loop(model: PreTrainedModel, groups: Sequence[Group]) -> TokenSurprise:
    """Train the model by GSPO on each `GROUPS_PER_STEP` groups in turn; at lag 0 the ratio is 1, and nothing is clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    differences, surprise, variance = [0.0], 0.0, 0.0
    for step in range(NUM_STEPS):
        losses: list[Tensor] = []
        for group in groups[step * GROUPS_PER_STEP : (step + 1) * GROUPS_PER_STEP]:
            rewards = torch.tensor([rollout.reward for rollout in group.rollouts])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for rollout, advantage in zip(group.rollouts, advantages, strict=True):
                prompt, completion = torch.tensor(group.prompt_token_ids), torch.tensor(rollout.token_ids)
                logits = model(torch.cat([prompt, completion])[None].long()).logits[0, len(prompt) - 1 : -1]
                every = logits.log_softmax(dim=-1)
                logprobs = every.gather(-1, completion[:, None].long())[:, 0]
                log_ratio = logprobs - torch.tensor(rollout.behavior_logprobs)
                losses.append(-log_ratio.mean().exp() * advantage)
                entropy = -(every.exp() * every).sum(dim=-1).detach()
                variance += ((every.exp() * every.square()).sum(dim=-1).detach() - entropy.square()).sum().item()
                surprise += (logprobs.detach() + entropy).sum().item()
                differences.append(log_ratio.detach().abs().max().item())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return TokenSurprise(max(differences), surprise / variance**0.5)


def test_a_run_with_bound_0_takes_the_steps_of_a_plain_loop(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    config_file = write_config(
        tmp_path,
        tiny_model,
        staleness={"max_staleness": 0},
        train={"num_steps": NUM_STEPS, "groups_per_step": GROUPS_PER_STEP, "learning_rate": LEARNING_RATE},
        actor={"engine": "transformers", "engine_options": {}, "max_inflight_groups": 4},
        log={"enabled": True},
    )
    train = services.start("train", config_file)
    assert services.wait(train, "train") == 0, services.output("train")
    assert all(row["clip/fraction"] == 0 for row in services.rows("run", "step"))
    records = read_log(tmp_path / "run" / LOG)
    groups = load_candidates(records, load(Path(config_file)), {}).groups
    assert len(groups) == NUM_STEPS * GROUPS_PER_STEP

    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    found = plain_loop(plain, sorted(groups, key=lambda group: group.lease_id))
    # Every group was sampled from the weights that the plain loop has at its step.
    assert found.largest_difference < 1e-4
    assert abs(found.z_score) < 4
    of_run = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    learned = torch.cat([(p - b).flatten() for p, b in zip(plain.parameters(), before.parameters(), strict=True)])
    apart = torch.cat([(p - r).flatten() for p, r in zip(plain.parameters(), of_run.parameters(), strict=True)])
    assert learned.norm() > 0
    assert apart.norm() / learned.norm() < 1e-3
