import pytest

from offbeat.learner.training.trainer import ess_scale, learning_rate


def rates(schedule, *, warmup_steps=0, num_steps=4):
    return [
        learning_rate(step, peak=1.0, schedule=schedule, warmup_steps=warmup_steps, num_steps=num_steps)
        for step in range(num_steps)
    ]


def test_constant_holds_the_peak():
    assert rates("constant") == [1.0, 1.0, 1.0, 1.0]


def test_warm_up_is_linear_and_never_zero():
    assert rates("constant", warmup_steps=3, num_steps=5) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_reaches_zero_one_step_after_the_last():
    assert rates("linear") == [1.0, 0.75, 0.5, 0.25]
    assert learning_rate(4, peak=1.0, schedule="linear", warmup_steps=0, num_steps=4) == 0.0


def test_cosine_is_half_way_down_in_the_middle():
    assert rates("cosine") == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])


def test_decay_starts_where_the_warm_up_ends():
    assert rates("linear", warmup_steps=2, num_steps=6) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])


def test_steps_beyond_the_end_have_no_learning_rate():
    for schedule in ("linear", "cosine"):
        assert learning_rate(9, peak=1.0, schedule=schedule, warmup_steps=0, num_steps=4) == pytest.approx(0.0)


def test_scale_is_the_root_of_the_share_of_the_on_policy_samples_and_never_above_one():
    assert ess_scale(0.25, on_policy_ess=1.0) == 0.5
    assert ess_scale(0.11, on_policy_ess=0.44) == pytest.approx(0.5)
    assert ess_scale(0.6, on_policy_ess=0.55) == 1.0
