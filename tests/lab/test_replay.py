"""`offbeat replay` on the folder of a run made by hand: a log of 12 leases, a checkpoint of a tiny model, and what it says."""

import io
import json
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config, RolloutSection, RunSection
from offbeat.common.settings.learning_sections import AdvantageSection, LossSection, RewardSection
from offbeat.common.settings.loading import load, resolved_toml
from offbeat.deploy.cli.main import make_app
from offbeat.lab.gradients import (
    Candidates,
    choose,
    compare,
    cosine,
    eligible,
    load_candidates,
    objective_config,
    quantiles,
)
from offbeat.lab.replay import CANNOT_TELL, CANNOT_TELL_OF_GRADIENTS, Report, render_replay, replay_run
from offbeat.learner.leases.events import Started, Tuned
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.log_reading import read_log
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.learner.leases.event_makers import make_accepted, make_granted, make_trained
from tests.learner.training.trainer_cases import make_config, make_groups

pytestmark = pytest.mark.slow

GROUPS_PER_STEP = 2
NUM_STEPS = 4
NUM_LEASES = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Bound 1, two groups a step, all under the weights of the step before; four batches, and a checkpoint of version 2."""
    from offbeat.learner.training.trainer import Trainer

    folder = tmp_path_factory.mktemp("replay")
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": "1+1="}) + "\n" for _ in range(NUM_LEASES)))
    config = make_config(tiny_model, groups_per_step=GROUPS_PER_STEP, num_steps=50, checkpoint_interval=2)
    config = msgspec.structs.replace(
        config,
        run=RunSection(dir=str(folder)),
        data=msgspec.structs.replace(config.data, train_data=str(folder / "train.jsonl")),
        staleness=msgspec.structs.replace(config.staleness, max_staleness=1),
        rollout=RolloutSection(group_size=4, max_new_tokens=16),
    )
    (folder / "config.toml").write_text(resolved_toml(config))
    groups = make_groups(NUM_LEASES)
    write_log(folder / "log", groups)
    trainer = Trainer(config)
    for version in range(2):
        trainer.train_batch(groups[GROUPS_PER_STEP * version : GROUPS_PER_STEP * (version + 1)])
    trainer.save_checkpoint(folder / "checkpoints" / "step-00000002", b"")
    trainer.close()
    return folder


def write_log(folder: Path, groups: list[Group], *, segment_bytes: int = 1 << 20, retain_bytes: int = 1 << 30) -> None:
    """Groups 2k and 2k + 1 are leased while the learner is at version k - 1, arrive then, and make the step from version k."""
    log = RolloutLog(
        folder, run_id="run", fsync="off", segment_bytes=segment_bytes, retain_bytes=retain_bytes, min_free_bytes=0
    )
    log.append(Started(at=0.0, run_id="r", learner_incarnation=1, policy_version=0))
    num_records = 1
    for step in range(len(groups) // GROUPS_PER_STEP):
        version = max(0, step - 1)
        of_step = groups[GROUPS_PER_STEP * step : GROUPS_PER_STEP * (step + 1)]
        for group in of_step:
            granted = make_granted(
                group.lease_id, at=float(step), prompt_id=group.lease_id, policy_version=version, oldest_version=version
            )
            log.append(granted)
        for group in of_step:
            completions = tuple(
                CompletionMeta(len(rollout.token_ids), "stop", rollout.reward, (Segment(version, 0),))
                for rollout in group.rollouts
            )
            accepted = make_accepted(
                group.lease_id, at=step + 0.2, completions=completions, generate_s=0.1, policy_version=version
            )
            ids = b"".join(rollout.token_ids.tobytes() for rollout in group.rollouts)
            log.append(accepted, ids, b"".join(rollout.behavior_logprobs.tobytes() for rollout in group.rollouts))
        num_records += 2 * GROUPS_PER_STEP
        # The step before: its groups were there before these were leased.
        if 1 <= step <= NUM_STEPS:
            ids_before = tuple(group.lease_id for group in groups[GROUPS_PER_STEP * (step - 1) : GROUPS_PER_STEP * step])
            log.append(
                make_trained(
                    *ids_before, at=step + 0.9, policy_version=step - 1, selected_at=step + 0.5, selected_after=num_records
                )
            )
            num_records += 1
    log.prune(log.end)
    log.close()


def text_of(report: Report) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(render_replay(report))
    return capture.get()


def offbeat(*arguments: str) -> str:
    result = CliRunner().invoke(make_app(), ["replay", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_recorded_settings_are_replayed_first_and_exactly(run: Path) -> None:
    report = replay_run(run)
    assert report.differences == []
    assert report.bounds == []
    row = report.recorded
    assert (row.num_recorded, row.num_admitted, row.num_trained, row.num_batches, row.num_left) == (12, 12, 8, 4, 4)
    assert row.lags == {"0": 2, "1": 6}
    assert (row.lag_mean, row.lag_max, row.over_bound, row.dropped) == (0.75, 1, 0.0, {})
    assert row.duration_s == pytest.approx(4.9)
    assert "exact: 12 admissions, 0 drops, 4 batches, and every lag are as recorded" in text_of(report)


def test_other_bounds_and_policies_get_a_row_each(run: Path) -> None:
    report = replay_run(run, staleness=(0, 1), policies=("gate", "drop"))
    assert [row.label for row in report.bounds] == [f"{bound} {policy}" for bound in (0, 1) for policy in ("gate", "drop")]
    at_zero = report.bounds[0]
    # Leases 2 and 3 alone are granted while others, 0 and 1, are open.
    assert (at_zero.num_recorded, at_zero.num_admitted, at_zero.num_trained) == (12, 10, 8)
    assert at_zero.lags == {"0": 8}
    assert report.bounds[2].lags == report.recorded.lags
    text = text_of(report)
    assert all(f"  {row.label}  " in text for row in report.bounds)


def test_run_whose_bound_moved_by_itself_is_replayed_under_every_policy(run: Path, tmp_path: Path) -> None:
    config = load(run / "config.toml", ["staleness.auto=true", "staleness.hard_max_staleness=8"])
    (tmp_path / "config.toml").write_text(resolved_toml(config))
    (tmp_path / "log").symlink_to(run / "log")
    report = replay_run(tmp_path, policies=("gate", "drop", "abort"))
    assert report.differences == []
    assert [row.lags for row in report.bounds] == [report.recorded.lags] * 3


def test_what_cannot_be_told_is_in_the_output(run: Path) -> None:
    report = replay_run(run, staleness=(0,))
    text = " ".join(text_of(report).split())
    assert report.cannot_tell == [*CANNOT_TELL]
    assert "What this cannot tell: - The reward that another bound, order or objective would have reached" in text
    assert "`offbeat simulate` predicts arrivals" in text
    assert set(CANNOT_TELL_OF_GRADIENTS) < set(replay_run(run, objectives=("gspo",)).cannot_tell)


def test_each_objective_is_measured_at_the_lags_of_each_bound(run: Path) -> None:
    report = replay_run(run, staleness=(0,), objectives=("gspo", "sapo"))
    bounds = ["fresh", "recorded", "0 gate"]
    assert [(row.objective, row.bound) for row in report.gradients] == [
        (name, bound) for name in ("gspo", "sapo(1, 1.05)") for bound in bounds
    ]
    for row in report.gradients:
        assert row.policy_version == 2
        assert row.cosine is not None
        assert -1 <= row.cosine <= 1
        assert row.grad_norm > 0
        assert 0 <= row.clip_fraction <= 1
        assert row.masked_fraction is None
    fresh, recorded, _ = report.gradients[:3]
    # Under version 2 were leased 6 and 7, under 1, and not trained on by then, 4 and 5: fresh are 6 and 4, and 7 and 5.
    assert (fresh.lag_mean, fresh.seen_fraction) == (0.5, 0.0)
    # Twice lag 1, of which 5 alone is left; 7 is as near as any, and first.
    assert (recorded.lag_mean, recorded.seen_fraction) == (0.5, 0.0)
    assert recorded.cosine == pytest.approx(fresh.cosine, abs=1e-4)
    assert {row.clip_fraction for row in report.gradients if row.objective == "sapo(1, 1.05)"} == {0.0}
    text = text_of(report)
    assert "Gradients without a step, means over checkpoints 2." in text
    assert report.notes == []


def test_run_without_checkpoints_says_which_settings_keep_them(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes((run / "config.toml").read_bytes())
    (tmp_path / "log").symlink_to(run / "log")
    report = replay_run(tmp_path, objectives=("gspo",))
    assert report.gradients == []
    assert len(report.notes) == 1
    assert "train.checkpoint_interval = 2" in report.notes[0]
    assert "train.keep_checkpoints" in report.notes[0]
    assert "! No gradients: the run kept no checkpoint" in text_of(report)


def test_checkpoint_without_groups_to_compare_is_passed_over(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_log(tmp_path / "log", make_groups(2))
    (tmp_path / "config.toml").write_bytes((run / "config.toml").read_bytes())
    (tmp_path / "checkpoints").symlink_to(run / "checkpoints")
    report = replay_run(tmp_path, objectives=("gspo",))
    assert report.gradients == []
    assert "step-00000002" in report.notes[0]
    assert "gspo at checkpoint 2: passed over; it takes 4 groups no newer" in caplog.text
    # Enough groups, but it was trained on all of them.
    config = load(run / "config.toml")
    candidates = Candidates(make_groups(8), trained_at=dict.fromkeys(range(8), 1))
    assert list(compare(config, ["gspo"], [run / "checkpoints" / "step-00000002"], candidates, {"0": [0]})) == []


def test_gradient_of_the_batch_that_was_trained_on_next_is_that_of_the_steps_metrics(run: Path) -> None:
    """A replay measures the gradient that the run's own next step saw."""
    from offbeat.learner.training.trainer import Trainer

    config = load(run / "config.toml")
    candidates = load_candidates(read_log(run / "log"), config, {})
    batch = [group for group in candidates.groups if group.lease_id in (4, 5)]
    with closing(Trainer(config)) as trainer:
        trainer.load_checkpoint(run / "checkpoints" / "step-00000002")
        metrics, gradient = trainer.gradient(batch)
        (step,) = trainer.train_batch(batch)
    assert {name: step[name] for name in metrics} == metrics
    assert gradient.double().norm().item() == pytest.approx(step["loss/grad_norm"], rel=1e-5)
    assert metrics["lag/mean"] == 1.0


def test_command_prints_tables_or_json(run: Path) -> None:
    said = json.loads(offbeat(str(run), "--staleness", "0, 1", "--policy", "drop", "--json"))
    assert said["differences"] == []
    assert [(row["max_staleness"], row["policy"]) for row in said["bounds"]] == [
        (0, "drop"),
        (1, "drop"),
    ]
    assert said["recorded"]["lags"] == {"0": 2, "1": 6}
    assert len(said["cannot_tell"]) == len(CANNOT_TELL)
    assert "What this cannot tell" in offbeat(str(run))


def test_settings_changed_while_the_run_went_on_are_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes((run / "config.toml").read_bytes())
    write_log(tmp_path / "log", make_groups(NUM_LEASES))
    log = RolloutLog(tmp_path / "log", run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 30, min_free_bytes=0)
    changed = {"staleness.max_staleness": "3", "train.learning_rate": "1e-5"}
    log.append(Tuned(at=9.0, settings=changed, who="me", reason="", policy_version=4))
    log.close()
    report = replay_run(tmp_path)
    assert report.differences == []
    assert [note.split(". ")[0] for note in report.notes] == [
        "Settings were changed while the run went on: staleness.max_staleness = 3 at version 4"
    ]


def test_settings_that_do_not_give_what_was_recorded_are_an_error(run: Path, tmp_path: Path) -> None:
    config = load(run / "config.toml", ["staleness.max_staleness=0"])
    (tmp_path / "config.toml").write_text(resolved_toml(config))
    (tmp_path / "log").symlink_to(run / "log")
    result = CliRunner().invoke(make_app(), ["replay", str(tmp_path)])
    assert result.exit_code == 1
    assert "NOT as recorded" in result.stdout
    assert "admitted: number 2 is 2 in the log, and" in result.stdout


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"policies": ("gat",)}, "staleness.staleness_policy"),
        ({"objectives": ("gsqo",)}, "gsqo is not a known name"),
        ({"objectives": ("ppo",)}, "the run's checkpoints have no critic"),
    ],
)
def test_request_that_cannot_be_is_refused(run: Path, request_: dict[str, tuple[str]], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        replay_run(run, **request_)  # pyright: ignore[reportArgumentType]


def test_bound_under_which_the_run_would_wait_for_ever_is_refused(run: Path, tmp_path: Path) -> None:
    config = load(run / "config.toml", ["train.steps_per_batch=2"])
    (tmp_path / "config.toml").write_text(resolved_toml(config))
    with pytest.raises(SettingError, match="the run would wait forever"):
        replay_run(tmp_path, staleness=(1, 0))


def test_folder_without_a_whole_log_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"it has no config\.toml"):
        replay_run(tmp_path)
    (tmp_path / "config.toml").write_bytes((run / "config.toml").read_bytes())
    with pytest.raises(SettingError, match=r"log\.enabled=true"):
        replay_run(tmp_path)
    write_log(tmp_path / "log", make_groups(NUM_LEASES), segment_bytes=500, retain_bytes=1000)
    with pytest.raises(SettingError, match=r"log\.retain_mb = 1024"):
        replay_run(tmp_path)


# Batches


def groups_of(*versions: int) -> list[Group]:
    """A group sampled under each of these versions."""
    return [
        make_groups(1, seed=index, policy_version=version)[0]._replace(lease_id=index) for index, version in enumerate(versions)
    ]


def lease_ids(groups: list[Group]) -> list[int]:
    return [group.lease_id for group in groups]


def test_quantiles_are_the_middles_of_equal_shares() -> None:
    assert quantiles([4, 0, 1, 2], 2) == [1, 4]
    assert quantiles([0] * 75 + [3] * 25, 4) == [0, 0, 0, 3]
    assert quantiles([5], 3) == [5, 5, 5]


def test_each_lag_gets_the_nearest_group_that_is_left() -> None:
    groups = groups_of(9, 8, 8, 3, 10)
    # Lags 1 2 2 7 0 at version 10.
    assert lease_ids(choose(groups, 10, [2, 2, 2, 9])) == [1, 2, 0, 3]
    assert lease_ids(choose(groups, 10, [0, 0])) == [4, 0]


def test_groups_newer_than_the_checkpoint_are_left_out_and_those_it_was_trained_on_come_last() -> None:
    groups = groups_of(1, 2, 3, 2)
    candidates = Candidates(groups, trained_at={0: 1, 1: 2})
    assert lease_ids(eligible(candidates, 2, drop_zero_variance=False)) == [1, 3, 0]
    equal = groups[3]._replace(rollouts=tuple(rollout._replace(reward=1.0) for rollout in groups[3].rollouts))
    candidates = Candidates([*groups[:3], equal], trained_at={0: 1})
    assert lease_ids(eligible(candidates, 2, drop_zero_variance=True)) == [1, 0]


def test_cosine_is_of_the_angle() -> None:
    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(math.sqrt(0.5))
    assert cosine(torch.tensor([1.0, 2.0]), torch.tensor([-2.0, -4.0])) == pytest.approx(-1.0)
    assert cosine(torch.zeros(2), torch.ones(2)) is None


# Objectives


@pytest.fixture
def config(tiny_model: Path) -> Iterator[Config]:
    yield make_config(tiny_model, loss={"correction": "token_tis(0, 3)"})


def test_the_runs_own_objective_stays_as_configured(config: Config) -> None:
    assert objective_config(config, "gspo") == config


def test_another_objective_has_its_own_values_and_the_runs_correction(config: Config) -> None:
    dapo = objective_config(config, "dapo")
    assert (dapo.loss.clip_low, dapo.loss.clip_high, dapo.loss.aggregation, dapo.loss.zero_variance) == (
        0.2,
        0.28,
        "token-mean",
        "drop",
    )
    assert dapo.reward.overlong_buffer == round(0.2 * config.rollout.max_new_tokens)
    assert dapo.loss.correction == "token_tis(0, 3)"
    assert objective_config(config, "dr_grpo").advantage.divide_by_std is False
    assert objective_config(config, "sapo").loss.clip_low is None
    assert objective_config(config, "minirl(9)").loss.objective == "minirl(9)"
    assert objective_config(config, "minirl").loss.objective == "minirl(5)"


def test_another_objective_takes_the_place_of_the_runs_own_loss(config: Config) -> None:
    own = msgspec.structs.replace(config, loss=msgspec.structs.replace(config.loss, function="my:loss"))
    assert objective_config(own, config.loss.objective).loss.function == "my:loss"
    assert objective_config(own, "grpo").loss == objective_config(config, "grpo").loss


def test_objective_that_contradicts_the_runs_anchor_is_refused(tiny_model: Path) -> None:
    config = Config(loss=LossSection(objective="grpo", anchor="proximal"), advantage=AdvantageSection(), reward=RewardSection())
    with pytest.raises(SettingError, match="reinforce"):
        objective_config(config, "reinforce")
