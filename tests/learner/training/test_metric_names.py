"""The table of metrics has the names that steps have, and no other."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from offbeat.common.models.routing import Routing
from offbeat.common.records.step_metrics import ROUTING_METRICS, STEP_METRICS, TASK_SHARES, Metric, step_metric
from offbeat.common.settings.learning_sections import AdvantageSection, KlSection
from offbeat.learner.calibration.calibration import save_calibration
from offbeat.learner.diagnostics.batch_metrics import group_metrics
from offbeat.learner.diagnostics.routing_metrics import RoutingComparison
from offbeat.learner.leases.groups import Group
from offbeat.protocols.payload import Turn
from tests.learner.calibration.test_calibration import make_calibration
from tests.learner.training.test_trainer import running
from tests.learner.training.trainer_cases import OWN_CRITIC, make_config, make_groups
from tests.routing_names import routing_metric

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]
ROOMS = ("common", "learner", "lab", "deploy")
AREAS = {metric.name.partition("/")[0] for metric in (*STEP_METRICS, *ROUTING_METRICS)}


def names(found: Iterable[Metric | None]) -> set[str]:
    """Return the names of the table's lines that were found; None among them fails."""
    metrics = list(found)
    assert None not in metrics
    return {metric.name for metric in metrics if metric is not None}


def literals(path: Path) -> set[str]:
    """Return the strings of a module that look like a metric's name; `tokens/s` is the head of a column."""
    constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    texts = (text for text in constants if isinstance(text, str) and text != "tokens/s")
    return {text for text in texts if re.fullmatch(rf"(?:{'|'.join(AREAS)})/\w+(?:/\w+)?", text)}


@pytest.mark.slow
def test_trainer_and_loop_write_the_tables_metrics_and_no_others(
    tiny_model: Path, tiny_moe_model: Path, tmp_path: Path
) -> None:
    floor = str(save_calibration(make_calibration(), tmp_path))
    extras = {"anchor": "decoupled", "correction": "token_tis", "entropy_coef": 0.01, "routing_replay": "recomputed"}
    kl, critic = KlSection(loss_coef=0.1, reward_coef=0.01), AdvantageSection(baseline="critic")
    written: set[str] = set()
    for config in (
        make_config(tiny_model, loss={"noise_floor": floor}),
        make_config(tiny_moe_model, loss=extras, kl=kl, advantage=critic, critic=OWN_CRITIC),
    ):
        with running(config) as trainer:
            for _ in range(2):
                (metrics,) = trainer.train_batch([_episode_group(), *make_groups(2)])
                written |= names(map(step_metric, metrics))
    written |= names(map(step_metric, group_metrics([_episode_group()], policy_version=0)))
    loop = literals(ROOT / "learner/service.py") | literals(ROOT / "learner/reporting/step_rows.py")
    # The begin of these names is imported.
    assert "{TASK_SHARES}{task}" in (ROOT / "learner/reporting/step_rows.py").read_text()
    loop.add(f"{TASK_SHARES}sums")
    assert written | names(map(step_metric, loop)) == {metric.name for metric in STEP_METRICS}


def _episode_group() -> Group:
    group = make_groups(3)[0]
    turns = [(Turn(0, 1), Turn(0, len(rollout.token_ids) - 1)) for rollout in group.rollouts]
    rollouts = [rollout._replace(environment_s=1.0, turns=two) for rollout, two in zip(group.rollouts, turns, strict=True)]
    return group._replace(task="sums", rollouts=tuple(rollouts))


def test_routing_history_has_the_tables_metrics_and_no_others() -> None:
    history = RoutingComparison(1, 1, lambda row: None)
    experts = torch.tensor([[[0, 1]], [[1, 2]]])
    for version in (0, 4, 6):
        history.add(version, Routing(experts, margins=torch.ones(2, 1), num_experts=4))
    metrics = history.metrics() | history.engine_metrics(6, experts.numpy())
    assert "routing/lag_5_8_overlap" in metrics
    assert names(map(routing_metric, metrics)) == {metric.name for metric in ROUTING_METRICS}


@pytest.mark.parametrize("room", ROOMS)
def test_metric_that_code_names_is_in_the_table(room: str) -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / room).rglob("*.py")
        for name in literals(path)
        if step_metric(name) is None and routing_metric(name) is None
    }
    assert wrong == set()


def test_name_is_in_the_table_once() -> None:
    every = [metric.name for metric in (*STEP_METRICS, *ROUTING_METRICS)]
    assert len(set(every)) == len(every)
