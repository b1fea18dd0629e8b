"""About `deploy.experiments.trials` and `lab.sweep.plan`: which runs a sweep has, with which settings, and what is refused."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.common.errors import SettingError
from offbeat.common.formats import split_values
from offbeat.common.records.run_folder import check_run_folder
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load
from offbeat.deploy.experiments.trials import check_ports_apart, check_trials, make_trials, prepare
from offbeat.lab.sweep.plan import find_baselines, make_plan, read_baseline, read_plan
from tests.deploy.experiments.sweeps import Sweep

pytestmark = pytest.mark.slow


def problem(*varied: str, seeds: int = 1) -> str:
    with pytest.raises(SettingError) as raised:
        make_plan(varied, num_seeds=seeds, first_seed=0)
    return str(raised.value)


def test_trials_are_the_product_of_values_and_seeds_one_seed_of_all_before_the_next() -> None:
    plan = make_plan(["max_staleness=0,4", "train.groups_per_step=8,16"], num_seeds=2, first_seed=7)
    assert plan.settings == {"staleness.max_staleness": ["0", "4"], "train.groups_per_step": ["8", "16"]}
    assert [trial.name for trial in plan.trials] == [
        f"max_staleness={bound}/groups_per_step={groups}/seed={seed}"
        for seed in (7, 8)
        for bound in (0, 4)
        for groups in (8, 16)
    ]


@pytest.mark.parametrize(
    ("listed", "values"),
    [
        ("0,1, 2", ["0", "1", "2"]),
        ("[0.9,0.95],[0.8,0.9]", ["[0.9,0.95]", "[0.8,0.9]"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("[[0],[1,2]]", ["[[0],[1,2]]"]),
        ("gspo", ["gspo"]),
        ("gspo + paper's band,grpo", ["gspo + paper's band", "grpo"]),
    ],
)
def test_values_are_split_at_commas_outside_of_brackets_and_quotes(listed: str, values: list[str]) -> None:
    assert split_values(listed) == values


@given(values=st.lists(st.integers(0, 99).map(str), min_size=1, max_size=6, unique=True), seeds=st.integers(1, 4))
@settings(max_examples=30)
def test_every_plan_has_each_trial_once(values: list[str], seeds: int) -> None:
    trials = make_plan([f"max_staleness={','.join(values)}"], num_seeds=seeds, first_seed=0).trials
    assert len({trial.name for trial in trials}) == len(trials) == len(values) * seeds
    assert {(trial.values[0], trial.seed) for trial in trials} == {(value, seed) for value in values for seed in range(seeds)}


def test_folders_of_long_values_have_names_that_a_file_system_takes(sweep: Sweep) -> None:
    long = "Lös die Aufgabe. " * 20
    plan = make_plan([f'data.system_prompt="{long}","{long}!",short'], num_seeds=1, first_seed=0)
    prepare(plan, make_trials(plan, sweep.home / "run.toml", ["data.chat_template=true"], sweep.folder), sweep.folder)
    first, second, short = (load(sweep.folder / trial.name / "run.toml").data.system_prompt for trial in plan.trials)
    assert (first, second, short) == (long, f"{long}!", "short")


def test_what_cannot_be_swept_is_refused_with_the_cure() -> None:
    assert "Did you mean staleness.max_staleness?" in problem("max_stalenes=0,1")
    assert "reward.clip or advantage.clip" in problem("clip=1,2")
    assert "Use --seeds" in problem("seed=0,1")
    assert "Use --out" in problem("run.dir=a,b")
    assert "a value is missing" in problem("max_staleness")
    assert "a value is missing" in problem("max_staleness=0,,1")
    assert "max_staleness=0/seed=0" in problem("max_staleness=0,0")
    assert "staleness.max_staleness is given twice" in problem("max_staleness=0", "max_off_policy_steps=1")
    assert "nothing is varied" in problem()


def test_impossible_value_is_refused_before_anything_is_written_and_names_the_run(sweep: Sweep) -> None:
    plan = make_plan(["max_staleness=0,4"], num_seeds=1, first_seed=0)
    with pytest.raises(SettingError, match=r'run of the sweep = "max_staleness=0/seed=0": .*would wait forever'):
        make_trials(plan, sweep.home / "run.toml", ["weights.interval=2"], sweep.folder)
    assert not sweep.folder.exists()


def test_secret_that_is_masked_is_refused_before_anything_is_written(sweep: Sweep) -> None:
    with pytest.raises(SettingError, match=r"actor\.engine_options"):
        sweep.trials("0", overrides=['actor.engine_options.hf_token="********"'])
    assert not sweep.folder.exists()


def test_check_that_fails_names_the_run(sweep: Sweep) -> None:
    def refuse(config: object) -> None:
        raise SettingError("task.reward", "x", "it cannot be imported", "Correct it.")

    with pytest.raises(SettingError, match=r'"max_staleness=0/seed=0": task.reward = "x": it cannot be imported'):
        check_trials(sweep.trials("0"), refuse)


def test_every_value_is_checked_once_whatever_the_number_of_seeds(sweep: Sweep) -> None:
    checked: list[int] = []

    def note(config: Config) -> None:
        checked.append(config.staleness.max_staleness)
        if config.staleness.max_staleness == 8:
            raise SettingError("task.reward", "x", "it cannot be imported", "Correct it.")

    with pytest.raises(SettingError, match="max_staleness=8/seed=0"):
        check_trials(sweep.trials("0", "4", "8", seeds=3), note)
    assert checked == [0, 4, 8]


KEYS = ["hub.key=a", "hub.learner_key=b", "hub.allowed_keys=c"]


@pytest.mark.parametrize(
    ("setting", "value", "others"),
    [
        ("hub.address", "tcp://10.0.0.1:5700", KEYS),
        ("hub.bind", "tcp://*:5700", ["hub.address=tcp://10.0.0.1:5700", *KEYS]),
        ("weights.port", "5701", []),
        ("weights.pull_port", "5701", []),
        ("metrics.bind", "127.0.0.1:9400", []),
        ("metrics.actor_bind", "127.0.0.1:9401", []),
    ],
)
def test_runs_beside_each_other_are_refused_one_port(setting: str, value: str, others: list[str], sweep: Sweep) -> None:
    trials = sweep.trials("0", "4", overrides=[f"{setting}={value}", *others])
    check_ports_apart(trials[:1])
    with pytest.raises(SettingError, match=rf"{setting} = .*cannot share the port\. Give port 0"):
        check_ports_apart(trials)


def test_runs_beside_each_other_have_any_free_ports(sweep: Sweep) -> None:
    check_ports_apart(sweep.trials("0", "4", overrides=["metrics.actor_bind=127.0.0.1:0"]))


def test_settings_of_a_run_are_the_files_with_its_values_and_its_own_folder(sweep: Sweep) -> None:
    sweep.trials("4", "8", seeds=2, overrides=["train.learning_rate=0.5"])
    config = load(sweep.folder / "max_staleness=8" / "seed=1" / "run.toml")
    assert (config.staleness.max_staleness, config.run.seed, config.train.learning_rate) == (8, 1, 0.5)
    assert config.run.dir == str(sweep.folder / "max_staleness=8" / "seed=1")
    assert config.hub.address == "tcp://127.0.0.1:0", "any free port: runs may share a machine"


def test_learner_of_a_run_binds_the_port_at_which_its_actors_look_for_it(sweep: Sweep) -> None:
    (trial,) = sweep.trials("4", overrides=["hub.bind=tcp://0.0.0.0:5700", *KEYS])
    assert (trial.config.hub.address, trial.config.hub.bind) == ("tcp://127.0.0.1:0", "")


def test_each_run_has_a_place_of_its_own_below_the_mirror(sweep: Sweep) -> None:
    trials = sweep.trials("4", "8", seeds=2, overrides=["run.mirror=s3://bucket/sweep/"])
    assert [trial.config.run.mirror for trial in trials] == [
        f"s3://bucket/sweep/max_staleness={bound}/seed={seed}" for seed in (0, 1) for bound in (4, 8)
    ]


def test_sweep_is_continued_with_its_mirror_elsewhere(sweep: Sweep) -> None:
    sweep.trials("4", overrides=["run.mirror=s3://bucket/seed=0"])
    sweep.trials("4", overrides=["run.mirror=s3://other"])
    assert load(sweep.folder / "max_staleness=4" / "seed=0" / "run.toml").run.mirror == "s3://other/max_staleness=4/seed=0"


def test_sweep_is_continued_by_another_path_of_its_folder(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = "hub.bind=tcp://127.0.0.1:0"
    overrides = [bind, "hub.address=file:hub.address"]
    sweep.trials("0", overrides=overrides)
    monkeypatch.chdir(sweep.home)
    sweep.folder = Path("sweep/")
    (trial,) = sweep.trials("0", overrides=overrides)
    assert load(trial.folder / "run.toml").hub.address == f"file:{trial.folder}/hub.address"
    with pytest.raises(SettingError, match=r"it holds another sweep: hub\.address"):
        sweep.trials("0", overrides=[bind, "hub.address=file:other"])


def test_objectives_own_settings_are_those_of_the_value(sweep: Sweep) -> None:
    plan = make_plan(["objective=gspo,grpo"], num_seeds=1, first_seed=0)
    gspo, grpo = make_trials(plan, sweep.home / "run.toml", [], sweep.folder)
    assert (gspo.config.loss.clip_by, grpo.config.loss.clip_by) == ("own_length", "run")
    assert (gspo.config.loss.clip_low, grpo.config.loss.clip_low) == (0.05, 0.2)


@pytest.mark.parametrize(
    ("varied", "seeds", "overrides", "said"),
    [
        (["max_staleness=0,8"], 2, [], "staleness.max_staleness is 0, 4 there and 0, 8 here"),
        (["max_staleness=0,4"], 1, [], "run.seed is 0, 1 there and 0 here"),
        (["max_staleness=0,4"], 2, ["train.num_steps=2"], "train.num_steps is 1 there and 2 here"),
        (["groups_per_step=8"], 2, [], "staleness.max_staleness is 0, 4 there and not varied here"),
        (["max_staleness=0,4", "groups_per_step=8"], 2, [], "train.groups_per_step is not varied there and 8 here"),
    ],
)
def test_another_sweep_in_the_same_folder_is_refused_with_what_differs(
    sweep: Sweep, varied: list[str], seeds: int, overrides: list[str], said: str
) -> None:
    sweep.trials("0", "4", seeds=2)
    before = sorted(sweep.folder.rglob("*"))
    plan = make_plan(varied, num_seeds=seeds, first_seed=0)
    with pytest.raises(SettingError, match="it holds another sweep") as raised:
        prepare(plan, make_trials(plan, sweep.home / "run.toml", overrides, sweep.folder), sweep.folder)
    assert said in str(raised.value)
    assert sorted(sweep.folder.rglob("*")) == before


def test_other_order_of_settings_is_another_sweep(sweep: Sweep) -> None:
    for order, is_same in ((["max_staleness=4", "groups_per_step=8"], True), (["groups_per_step=8", "max_staleness=4"], False)):
        plan = make_plan(order, num_seeds=1, first_seed=0)
        trials = make_trials(plan, sweep.home / "run.toml", [], sweep.folder)
        if is_same:
            prepare(plan, trials, sweep.folder)
        else:
            with pytest.raises(SettingError, match="the settings are varied in the order"):
                prepare(plan, trials, sweep.folder)


def test_folder_without_a_plan_or_with_a_damaged_one_is_refused_as_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"it has no plan.json"):
        read_plan(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(SettingError, match=r"it has no plan.json"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(SettingError, match=r"its plan.json is damaged"):
        read_plan(tmp_path)


def test_sweep_that_cannot_be_written_any_more_is_refused(sweep: Sweep) -> None:
    sweep.trials("4")
    # Stands for a folder that this user may only read.
    (sweep.folder / "plan.json.partial").mkdir()
    with pytest.raises(SettingError, match=r'--out = ".*/sweep": the folder cannot be written'):
        sweep.trials("4")


@pytest.mark.parametrize("out", ["run.toml", "run.toml/sweep", "/proc/sweep"])
def test_folder_that_cannot_be_made_or_written_is_refused(sweep: Sweep, out: str) -> None:
    sweep.folder = sweep.home / out
    with pytest.raises(SettingError, match=rf'--out = ".*{out}": the folder cannot be written'):
        sweep.trials("4")


def test_plan_is_json_that_says_what_is_varied(sweep: Sweep) -> None:
    sweep.trials("0", "4", seeds=2)
    told = msgspec.json.decode((sweep.folder / "plan.json").read_bytes())
    assert told == {"settings": {"staleness.max_staleness": ["0", "4"]}, "seeds": [0, 1]}


def test_sweep_is_continued_though_some_of_its_runs_have_not_begun(sweep: Sweep) -> None:
    checked: list[object] = []

    def note(config: Config) -> None:
        check_run_folder(config.run)
        checked.append(config.run.resume)

    sweep.does("0-0", "write('step', 'final'); (run / 'log').mkdir()")
    sweep.run("0")
    check_trials(sweep.trials("0", "4"), note)
    assert checked == [True, False]


def test_each_value_of_a_shard_is_checked_whatever_its_seed(sweep: Sweep) -> None:
    checked: list[tuple[int, int]] = []
    # With two parts of three values the first has seeds 0, 0 and 1.
    part = sweep.trials("0", "4", "8", seeds=2)[::2]
    check_trials(part, lambda config: checked.append((config.staleness.max_staleness, config.run.seed)))
    assert checked == [(0, 0), (8, 0), (4, 1)]


def test_baseline_of_a_value_has_the_chosen_settings_and_is_like_it_otherwise() -> None:
    plan = make_plan(["objective=gspo,grpo", "max_staleness=0,4"], num_seeds=1, first_seed=0)
    chosen = read_baseline(plan, ["objective=gspo"])
    assert chosen == {"loss.objective": "gspo"}
    assert find_baselines(plan, chosen) == {
        ("gspo", "0"): ("gspo", "0"),
        ("gspo", "4"): ("gspo", "4"),
        ("grpo", "0"): ("gspo", "0"),
        ("grpo", "4"): ("gspo", "4"),
    }
    both = read_baseline(plan, ["objective=grpo", "staleness.max_staleness=4"])
    assert set(find_baselines(plan, both).values()) == {("grpo", "4")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("objective=ppo", "the sweep has no such value. Take one of gspo, grpo"),
        ("objective", "the sweep has no such value"),
        ("max_staleness=0", "the sweep does not vary this setting. Take one of loss.objective"),
        ("objectiv=gspo", "no setting has this name"),
    ],
)
def test_baseline_that_the_sweep_does_not_have_is_refused(text: str, said: str) -> None:
    plan = make_plan(["objective=gspo,grpo"], num_seeds=1, first_seed=0)
    with pytest.raises(SettingError, match=said):
        read_baseline(plan, [text])
