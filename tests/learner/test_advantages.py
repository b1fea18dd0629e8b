import torch

from learner.advantages import group_advantages


def test_advantages_are_centered_and_divided_by_the_unbiased_standard_deviation():
    # Rewards 0, 0, 0, 4: mean 1, squares 1 + 1 + 1 + 9 = 12, std sqrt(12 / 3) = 2.
    advantages = group_advantages(torch.tensor([0.0, 0.0, 0.0, 4.0]), divide_by_std=True, epsilon=0.0)
    torch.testing.assert_close(advantages, torch.tensor([-0.5, -0.5, -0.5, 1.5]))


def test_without_std_only_the_mean_is_subtracted():
    advantages = group_advantages(torch.tensor([0.0, 0.0, 0.0, 4.0]), divide_by_std=False)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, -1.0, -1.0, 3.0]))


def test_each_group_is_its_own_baseline():
    rewards = torch.tensor([[0.0, 1.0], [10.0, 12.0]])
    torch.testing.assert_close(group_advantages(rewards, divide_by_std=False), torch.tensor([[-0.5, 0.5], [-1.0, 1.0]]))


def test_equal_rewards_give_advantages_of_exactly_zero():
    # Three times 0.1 has a float32 mean that is not 0.1.
    rewards = torch.tensor([[0.1, 0.1, 0.1], [1 / 3, 1 / 3, 1 / 3]])
    assert torch.equal(group_advantages(rewards, divide_by_std=True), torch.zeros(2, 3))
    assert torch.equal(group_advantages(rewards, divide_by_std=False), torch.zeros(2, 3))


def test_a_group_of_one_has_no_advantage():
    assert torch.equal(group_advantages(torch.tensor([3.0]), divide_by_std=True), torch.zeros(1))
