"""SAO and a critic with a trunk of its own: against a loop of plain torch, in a warm-up and over restarts."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.common.errors import SettingError
from offbeat.common.settings.learning_sections import CriticSection
from offbeat.learner.diagnostics.batch_metrics import Metrics
from offbeat.learner.leases.groups import Group
from offbeat.learner.policy.critic import attention_parameters
from offbeat.protocols.payload import Turn
from tests.learner.training.test_trainer import running, weights_of
from tests.learner.training.trainer_cases import OWN_CRITIC, SAO, make_config, make_groups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def episodes(seed: int) -> list[Group]:
    """Return six groups of one completion; some have a tool's answer after their first tokens."""
    groups = make_groups(6, group_size=1, seed=seed)
    found: list[Group] = []
    for index, group in enumerate(groups):
        (rollout,) = group.rollouts
        if index % 2 and len(rollout.token_ids) > 2:
            turns = (Turn(0, 2), Turn(3, len(rollout.token_ids) - 2))
            rollout = rollout._replace(turns=turns, context_ids=np.array([7, 30, 12], dtype=np.int32))
        # Ratios far from 1, so that both sides of the band leave tokens out.
        spread = 0.5 * np.random.default_rng(index).standard_normal(len(rollout.token_ids)).astype(np.float32)
        found.append(group._replace(rollouts=(rollout._replace(behavior_logprobs=rollout.behavior_logprobs + spread),)))
    return found


class PlainSao:
    """SAO in plain torch: one completion at a time, GAE in a loop over the sampled tokens, two AdamW optimizers."""

    def __init__(self, model: Path, *, policy_rate: float) -> None:
        from transformers import AutoModelForCausalLM

        self.policy, self.trunk = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2))
        self.head = torch.nn.Linear(self.trunk.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        of_critic = [weight for name, weight in self.trunk.named_parameters() if "self_attn" not in name]
        options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=policy_rate, **options)
        self.critics = torch.optim.AdamW([*of_critic, *self.head.parameters()], lr=5e-3, **options)

    def step(self, groups: list[Group]) -> float:
        """Take one step of the policy and two of the critic; return the value loss before them."""
        num_tokens = sum(len(group.rollouts[0].token_ids) for group in groups)
        before: list[Tensor] = []
        targets: list[Tensor] = []
        loss = torch.zeros(())
        for group in groups:
            with torch.no_grad():
                values = self._values(group)
            advantages, returns = self._estimate(values, group.rollouts[0].reward)
            before.append(values)
            targets.append(returns)
            tokens, places = self._sequence(group)
            logprobs = self.policy(input_ids=tokens[None]).logits[0].log_softmax(-1)[places - 1, tokens[places]]
            ratio = (logprobs - torch.from_numpy(group.rollouts[0].behavior_logprobs)).exp().detach()
            inside = (ratio > 1 - 0.3) & (ratio < 1 + 5.0)
            loss = loss - (inside * ratio * advantages * logprobs).sum() / num_tokens
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        losses: list[float] = []
        for _ in range(2):
            errors = torch.zeros(())
            for group, old, target in zip(groups, before, targets, strict=True):
                values = self._values(group)
                near = old + (values - old).clamp(-0.2, 0.2)
                errors = errors + 0.5 * torch.maximum((values - target).square(), (near - target).square()).sum()
            losses.append(errors.item() / num_tokens)
            self.critics.zero_grad()
            (errors / num_tokens).backward()
            trained = [weight for of_group in self.critics.param_groups for weight in of_group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            self.critics.step()
        return losses[0]

    def _sequence(self, group: Group) -> tuple[Tensor, Tensor]:
        """Return all tokens of an episode, and the places of those that were sampled."""
        (rollout,) = group.rollouts
        tokens, places = list(group.prompt_token_ids), []
        if not rollout.turns:
            places = list(range(len(tokens), len(tokens) + len(rollout.token_ids)))
            return torch.tensor([*tokens, *rollout.token_ids]), torch.tensor(places)
        for _, context, sampled in rollout.pieces():
            tokens += list(context)
            places += range(len(tokens), len(tokens) + len(sampled))
            tokens += list(sampled)
        return torch.tensor(tokens), torch.tensor(places)

    def _values(self, group: Group) -> Tensor:
        tokens, places = self._sequence(group)
        states = self.trunk(input_ids=tokens[None], output_hidden_states=True).hidden_states[-1][0]
        return self.head(states[places - 1]).squeeze(-1)

    @staticmethod
    def _estimate(values: Tensor, reward: float) -> tuple[Tensor, Tensor]:
        """GAE over the sampled tokens, with lambda 1 - 1/(1.5 n) for the policy and 1 for the targets."""
        n = len(values)
        gae_lambda = 1 - 1 / (1.5 * n)
        advantages, after, value_after = torch.zeros(n), 0.0, 0.0
        for token in reversed(range(n)):
            delta = (reward if token == n - 1 else 0.0) + value_after - float(values[token])
            after = delta + gae_lambda * after
            advantages[token], value_after = after, float(values[token])
        return advantages, torch.full((n,), reward)


def distance(weights: dict[str, Tensor], module: torch.nn.Module) -> float:
    """Return the distance of weights from a module's. Adam magnifies the rounding of gradients near 0, so only all together."""
    return float(
        sum((weights[name].detach() - weight.detach()).square().sum() for name, weight in module.named_parameters()) ** 0.5
    )


@pytest.fixture(params=["packed", "not packed"])
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    """A model that is packed, and a StableLM, whose trial pass is the first to show that it cannot be."""
    from transformers import AutoTokenizer, StableLmConfig, StableLmForCausalLM

    if request.param == "packed":
        return tiny_model
    words = AutoTokenizer.from_pretrained(tiny_model)
    sizes = {"vocab_size": len(words), "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"eos_token_id": words.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        StableLmForCausalLM(StableLmConfig(**sizes, **layers, **tokens)).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    return tmp_path


def test_sao_takes_the_steps_of_a_loop_in_plain_torch(model: Path) -> None:
    plain = PlainSao(model, policy_rate=1e-3)
    config = make_config(model, groups_per_step=6, learning_rate=1e-3, **SAO)
    masked: list[float] = []
    with running(config) as trainer:
        critic = trainer.networks.critic
        assert critic is not None
        start = {name: weight.clone() for name, weight in weights_of(trainer).items()}
        for seed in range(4):
            expected = plain.step(episodes(seed))
            (metrics,) = trainer.train_batch(episodes(seed))
            assert metrics["loss/value"] == pytest.approx(expected, rel=1e-4)
            masked.append(metrics["clip_tokens/fraction"])
        weights = weights_of(trainer)
        values = dict(critic.module.network.policy.named_parameters())
        head = critic.module.network.value_head
    assert min(masked) > 0.05, "tokens outside the band are there to be left out"
    assert distance(weights, plain.policy) < 1e-3 * distance(start, plain.policy)
    assert distance(values, plain.trunk) < 1e-3 * distance(start, plain.trunk)
    assert head is not None and distance(dict(head.named_parameters()), plain.head) < 1e-3 * float(
        plain.head.weight.detach().norm()
    )


def test_only_the_critic_learns_during_its_warm_up_and_its_attention_never(tiny_model: Path) -> None:
    critic = msgspec.structs.replace(OWN_CRITIC, alone_until=2)
    config = make_config(tiny_model, groups_per_step=6, learning_rate=1e-3, **{**SAO, "critic": critic})
    with running(config) as trainer:
        own = trainer.networks.critic
        assert own is not None
        trained = dict(own.module.network.policy.named_parameters())
        start, at_start = weights_of(trainer), {name: weight.detach().clone() for name, weight in trained.items()}
        rates = [trainer.train_batch(episodes(seed))[0]["loss/learning_rate"] for seed in range(2)]
        assert all(torch.equal(start[name], weight) for name, weight in weights_of(trainer).items())
        metrics = trainer.train_batch(episodes(2))[0]
        assert any(not torch.equal(start[name], weight) for name, weight in weights_of(trainer).items())
    assert rates == [0, 0] and metrics["loss/learning_rate"] == 1e-3
    moved = {name for name, weight in trained.items() if not torch.equal(weight, at_start[name])}
    assert moved and not any("self_attn" in name for name in moved)
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.0.post_attention_layernorm.weight"} <= moved


def test_critic_of_its_own_goes_on_after_a_restart_and_explains_its_targets(tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(tiny_model, groups_per_step=6, learning_rate=1e-3, **SAO)
    with running(config) as trainer:
        assert not any("value" in spec.name for spec in trainer.layout())
        explained = [trainer.train_batch(episodes(0))[0]["loss/explained_variance"] for _ in range(12)]
        trainer.save_checkpoint(tmp_path / "step-00000012", b"")
        following = trainer.train_batch(episodes(1))[0]
    assert explained[0] == 0, "a head of zeros explains nothing"
    assert explained[-1] > 0.3
    with running(config) as trainer:
        trainer.load_checkpoint(tmp_path / "step-00000012")
        again = trainer.train_batch(episodes(1))[0]
    assert {name: again[name] for name in ("loss/value", "loss/policy", "loss/value_grad_norm")} == {
        name: following[name] for name in ("loss/value", "loss/policy", "loss/value_grad_norm")
    }
    shared = make_config(tiny_model, groups_per_step=6, **{**SAO, "critic": CriticSection()})
    with running(shared) as trainer, pytest.raises(ValueError, match="lora and critic"):
        trainer.load_checkpoint(tmp_path / "step-00000012")


@pytest.mark.parametrize("critic", [OWN_CRITIC, CriticSection()], ids=["own trunk", "shared trunk"])
def test_skipped_completion_trains_no_critic_and_is_nothing_to_explain(tiny_model: Path, critic: CriticSection) -> None:
    def metrics_of(reward: float) -> Metrics:
        """Return the critic's metrics of a step in which a skipped completion has this reward."""
        groups = episodes(1)
        (rollout,) = groups[0].rollouts
        broken = rollout._replace(behavior_logprobs=np.full_like(rollout.behavior_logprobs, -60.0), reward=reward)
        groups[0] = groups[0]._replace(rollouts=(broken,))
        with running(make_config(tiny_model, groups_per_step=6, learning_rate=1e-3, **{**SAO, "critic": critic})) as trainer:
            trainer.train_batch(episodes(0))
            (metrics,) = trainer.train_batch(groups)
        assert metrics["broken/leases"] == {"0": 1}
        names = ("loss/value", "loss/value_grad_norm", "loss/explained_variance")
        return {name: metrics[name] for name in names if name in metrics}

    assert metrics_of(0.0) == metrics_of(1000.0)


@pytest.mark.parametrize("critic", [OWN_CRITIC, CriticSection(target_lambda=1.0)], ids=["own trunk", "shared trunk"])
def test_value_loss_is_the_mean_over_the_tokens_that_are_not_skipped(tiny_model: Path, critic: CriticSection) -> None:
    """The head starts at 0 and every target is 1, so each token has a loss of 1/2."""
    (group,) = make_groups(1)
    first, *others = (rollout._replace(reward=1.0) for rollout in group.rollouts)
    broken = first._replace(behavior_logprobs=np.full_like(first.behavior_logprobs, -60.0))
    group = group._replace(rollouts=(broken, *others))
    with running(make_config(tiny_model, groups_per_step=1, **{**SAO, "critic": critic})) as trainer:
        (metrics,) = trainer.train_batch([group])
    assert metrics["broken/leases"] == {"0": 1}
    assert metrics["loss/value"] == pytest.approx(0.5)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_later_update_of_the_critic_that_is_not_finite_stops_the_run_in_its_step(tiny_model: Path, zero_stage: int) -> None:
    # The first update has a finite gradient, and makes weights whose squares are not.
    critic = msgspec.structs.replace(OWN_CRITIC, learning_rate_factor=1e22, value_clip=None)
    config = make_config(tiny_model, zero_stage=zero_stage, learning_rate=1e-4, **{**SAO, "critic": critic})
    with running(config) as trainer, pytest.raises(FloatingPointError, match=r"the critic's gradient norm in optimizer step 0"):
        trainer.train_batch(make_groups(3))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rewards_that_break_policy_and_critic_are_reported_with_their_leases(tiny_model: Path) -> None:
    groups = make_groups(3)
    poisoned = groups[0].rollouts[0]._replace(reward=float("inf"))
    groups[0] = groups[0]._replace(rollouts=(poisoned, *groups[0].rollouts[1:]))
    with (
        running(make_config(tiny_model, **SAO)) as trainer,
        pytest.raises(FloatingPointError, match=r"^the gradient norm of optimizer step 0 .*leases"),
    ):
        trainer.train_batch(groups)


def test_model_without_layers_named_attention_cannot_freeze_them() -> None:
    with pytest.raises(SettingError, match=r"critic\.freeze_attention.*some/model.*false"):
        list(attention_parameters(torch.nn.Sequential(torch.nn.Linear(2, 2)), "some/model"))
