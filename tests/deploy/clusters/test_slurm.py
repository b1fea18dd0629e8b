"""Claims about the batch scripts of a run on Slurm, read back as Slurm and our own command line read them."""

import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.deploy.cli.arguments import load_config
from offbeat.deploy.clusters.slurm import ACTORS_SCRIPT, LEARNER_SCRIPT, write_scripts
from offbeat.deploy.local.keygen import make_keys
from offbeat.deploy.local.starts import PROGRAM
from offbeat.protocols.keys import AllowList, Sender, read_key_pair


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a space in its name, in which `offbeat deploy` is started."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(
    toml: str = "[train]\nnum_steps = 7\n", *overrides: str, learner: tuple[str, ...] = (), actor: tuple[str, ...] = ()
) -> Config:
    """Write the scripts of a run in the current folder to `job`. Return its config."""
    Path("run.toml").write_text(toml)
    config = load_config(["run.toml", *overrides])
    write_scripts(config, Path("run.toml"), overrides, Path("job"), learner, actor)
    return config


def directives(script: str) -> dict[str, str]:
    """Return the options of sbatch in a script; of two, the later one counts."""
    lines = (Path("job") / script).read_text().splitlines()
    words = [word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def started(script: str, **variables: str) -> list[str]:
    """Return the arguments of `offbeat` that a script starts it with, run by bash as Slurm would."""
    text = (Path("job") / script).read_text()
    # The program that the script becomes prints its arguments instead.
    shown = text.replace(shlex.join(PROGRAM), "printf '%s\\0'", 1).replace("exec printf", "exec /usr/bin/printf")
    assert shown != text
    words = subprocess.run(["bash", "-c", shown], env=variables, capture_output=True, check=True).stdout
    return words.decode().split("\0")[:-1]


def test_both_scripts_start_our_commands_with_one_config(folder: Path) -> None:
    write("[train]\nnum_steps = 7\n", "run.seed=5", "run.dir=runs/a")
    command, *arguments = started(LEARNER_SCRIPT)
    learner = load_config(arguments)
    assert (command, learner.train.num_steps, learner.run.seed) == ("learner", 7, 5)
    command, *arguments = started(ACTORS_SCRIPT, SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="3")
    actor = load_config(arguments)
    assert (command, actor.actor.name, actor.run.seed, actor.train) == ("actor", "actor-12-3", 5, learner.train)
    assert learner.run.dir == actor.run.dir == str(folder / "runs/a")
    assert learner.hub.address == actor.hub.address == f"file:{folder}/runs/a/hub.address"
    assert learner.hub.bind == "tcp://0.0.0.0:0"


def test_folder_named_after_the_time_is_the_same_in_both_scripts_and_at_each_start(folder: Path) -> None:
    config = write()
    runs = {load_config(started(script)[1:]).run.dir for script in (LEARNER_SCRIPT, ACTORS_SCRIPT) for _ in range(2)}
    assert runs == {str(folder / config.run.dir)}


def test_learner_begins_goes_on_and_pauses_by_the_same_words_and_the_users_notice_stays(folder: Path) -> None:
    write()
    run = load_config(started(LEARNER_SCRIPT)[1:]).run
    assert (run.resume, run.grace_s) == ("auto", 285)
    assert "--signal=B:TERM@300" in (Path("job") / LEARNER_SCRIPT).read_text()
    write("[run]\ngrace_s = 60\n")
    assert load_config(started(LEARNER_SCRIPT)[1:]).run.grace_s == 60


def test_actors_share_a_key_that_fits_their_names_and_no_secret_is_in_a_script(folder: Path) -> None:
    write()
    hub = load_config(started(ACTORS_SCRIPT, SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="3")[1:]).hub
    fleet = read_key_pair(Path(hub.key))
    assert Sender(fleet.owner.name, "actor").may_be("actor-12-3")
    assert AllowList(Path(hub.allowed_keys)).sender(fleet.owner.public) is not None
    learner = load_config(started(LEARNER_SCRIPT)[1:]).hub
    assert read_key_pair(Path(learner.key.replace("{name}", "learner"))).owner.role == "learner"
    for path in (*Path("job/keys").glob("*.key"), *Path("job").glob("*.sbatch")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert fleet.secret not in path.read_bytes() or path.suffix == ".key"


def test_scripts_have_lines_to_fill_in_for_what_the_user_has_not_given(folder: Path) -> None:
    write()
    text = (Path("job") / ACTORS_SCRIPT).read_text()
    for option in ("--partition=", "--time=", "--mem=", "--cpus-per-task="):
        assert f"\n##SBATCH {option}" in text
    assert text.count("hub.key=") == 1


def test_scripts_that_are_written_again_keep_the_keys(folder: Path) -> None:
    write()
    keys = {path: path.read_bytes() for path in Path("job/keys").iterdir()}
    write()
    assert {path: path.read_bytes() for path in Path("job/keys").iterdir()} == keys


def test_address_and_keys_of_the_user_stay_and_the_fleet_key_is_looked_for_beside_them(folder: Path) -> None:
    hub = '[hub]\naddress = "tcp://gate:5700"\nbind = "tcp://0.0.0.0:5700"\nkey = "mine/{name}.key"\n'
    hub += 'learner_key = "mine/learner.pub"\nallowed_keys = "mine/allowed_keys"\n'
    with pytest.raises(SettingError, match=r"hub.key.*offbeat keygen .*/mine 'actor-\*'"):
        write(hub)
    assert not Path("job/actors.sbatch").exists()
    make_keys(Path("mine"), ["actor-*"])
    config = write(hub)
    assert load_config(started(LEARNER_SCRIPT)[1:]).hub == config.hub
    assert load_config(started(ACTORS_SCRIPT)[1:]).hub.key == str(folder / "mine/actor.key")
    assert not Path("job/keys").exists()


def test_jobs_can_be_requeued_and_run_in_this_folder_with_the_options_of_the_user(folder: Path) -> None:
    options = {"learner": ("--partition=gpu --gres=gpu:2", "--signal=B:TERM@900"), "actor": ("--partition=spot",)}
    write("[scale]\nactors = 3\n", **options)
    learner, actors = directives(LEARNER_SCRIPT), directives(ACTORS_SCRIPT)
    assert (learner["--partition"], learner["--gres"], learner["--signal"]) == ("gpu", "gpu:2", "B:TERM@900")
    assert (actors["--partition"], actors["--array"]) == ("spot", "0-2")
    for found in (learner, actors):
        assert found["--chdir"] == str(folder)
        assert "--requeue" in found
        assert Path(found["--output"]).parent.is_dir()
        assert "--export" not in found
    assert learner["--job-name"] != actors["--job-name"]


def test_folder_of_logs_has_no_pattern_of_slurm(folder: Path) -> None:
    Path("run.toml").touch()
    write_scripts(load_config(["run.toml"]), Path("run.toml"), (), Path("50%job"), (), ())
    assert f"{folder}/50%%job/logs/learner-%j.log" in Path("50%job", LEARNER_SCRIPT).read_text()


def test_names_of_jobs_are_those_of_one_run_and_are_names_that_a_pool_reads(folder: Path) -> None:
    names: list[str] = []
    for run in ("a/my run", "a/my run", "b/my run"):
        write("[train]\nnum_steps = 7\n", f"run.dir={run}")
        names.append(directives(ACTORS_SCRIPT)["--job-name"])
        assert names[-1] == directives(LEARNER_SCRIPT)["--job-name"].replace("learner-", "actors-")
        assert f"#SBATCH --job-name={names[-1]}\n" in (Path("job") / ACTORS_SCRIPT).read_text()
    assert names[0].startswith("actors-my-run-")
    assert names[0] == names[1] != names[2]


def test_actors_have_the_time_that_they_take_to_leave_and_a_margin_before_their_time_limit(folder: Path) -> None:
    write("[actor]\nleave_within_s = 90.5\n[hub]\ndead_after_s = 10\n")
    assert directives(ACTORS_SCRIPT)["--signal"] == "B:TERM@116"
    write('[actor]\nleave = "return"\n[hub]\ndead_after_s = 10\n')
    assert directives(ACTORS_SCRIPT)["--signal"] == "B:TERM@25"


def test_learner_of_several_processes_is_started_by_torchrun(folder: Path) -> None:
    write("[launch]\nlearner_processes = 4\n")
    text = Path("job/learner.sbatch").read_text()
    options = "--standalone --nproc-per-node=4 --shutdown-timeout=285"
    assert f"torch.distributed.run {options} -m offbeat.deploy.cli.main learner " in text


def test_torchrun_waits_for_a_checkpoint_as_long_as_the_users_grace(folder: Path) -> None:
    from torch.distributed.run import get_args_parser

    write("[launch]\nlearner_processes = 2\n[run]\ngrace_s = 90.5\n")
    words = shlex.split(Path("job/learner.sbatch").read_text(), comments=True)
    options = get_args_parser().parse_args(words[words.index("torch.distributed.run") + 1 :])
    assert (options.shutdown_timeout, options.training_script) == (91, "offbeat.deploy.cli.main")
