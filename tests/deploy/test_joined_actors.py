"""Actors that have nothing but the learner's address, and the code of the reward."""

import tempfile
from pathlib import Path

import pytest

from offbeat.common.processes.shutdown import GAVE_UP_STATUS
from offbeat.common.settings.loading import load
from tests.deploy.local.warm import WarmProcess
from tests.deploy.services import REWARD_MODULE, SERVICES_S, Services, services_in, write_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(SERVICES_S)]


def test_actor_in_an_empty_folder_joins_and_its_groups_are_trained_but_not_with_other_code(
    services: Services, warm: WarmProcess, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(
        tmp_path, tiny_model, actor={"engine": "transformers", "engine_options": {}, "name": "of-the-learner"}
    )
    address = load(Path(config)).hub.address
    learner = services.start("learner", config)
    before = set(Path(tempfile.gettempdir()).glob("offbeat-model-*"))
    places = [tmp_path / "elsewhere", tmp_path / "outdated"]
    for place in places:
        place.mkdir()
    with services_in(places[0], warm) as elsewhere, services_in(places[1], warm) as outdated:
        (places[1] / "my_reward.py").write_text(REWARD_MODULE.replace("/ 16", "/ 17"))
        second = outdated.start("actor", "--join", address, "actor.name=b")
        assert outdated.wait(second, "actor") == GAVE_UP_STATUS
        said = outdated.output("actor")
        assert "the actor's code of my_reward:digits is not that of the learner: my_reward.py (hash " in said
        first = elsewhere.start("actor", "--join", address, "actor.name=a", "max_inflight_groups=2")
        assert services.wait(learner, "learner") == 0, services.output("learner")
        assert elsewhere.wait(first, "actor") == 0, elsewhere.output("actor")
    assert {path.name for path in places[0].iterdir()} - {"__pycache__"} == {"actor.log", "my_reward.py"}
    assert set(Path(tempfile.gettempdir()).glob("offbeat-model-*")) <= before, "the model's files went with the actors"

    assert services.rows("run", "final")[-1]["ledger"]["trained"] == 24
    events = {row["event"]: row for row in services.rows("run", "event") if row.get("actor") == "a"}
    assert "starts without weights" in events["actor_joined"]["detail"]
    assert events["engine_noise"]["detail"].startswith("at version "), "the floor is its first update's"
    assert max(row["max_abs_diff"] for row in services.rows("run", "canary")) < 1e-3
