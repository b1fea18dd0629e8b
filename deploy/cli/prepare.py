"""The commands before a run: its settings, its environment, its noise floor, its keys."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec.structs import replace

from offbeat.common.records.logs import configure_logs
from offbeat.deploy.cli.arguments import QUICKSTART, Arguments, begin_log, load_config, start_time


def check_command(
    arguments: Arguments = None,
    show_explanation: Annotated[
        bool, typer.Option("--explain", help="Instead describe the named settings, or every setting.")
    ] = False,
) -> None:
    """Check a config for mistakes without starting anything, and print the resolved settings."""
    from offbeat.common.records.run_folder import decide_resume
    from offbeat.common.settings.checks import check_before_run
    from offbeat.common.settings.loading import resolved_toml
    from offbeat.deploy.checks.preflight import look
    from offbeat.deploy.local.quickstart.prepared import expand_made

    if show_explanation:
        explain_command(arguments)
        return
    begin_log("check")
    config = load_config(arguments, default=QUICKSTART)
    decided = decide_resume(config)
    # Prepared tasks are made when they are first run.
    expanded = expand_made(decided)
    if expanded is None:
        check_before_run(decided)
    else:
        for note in look(expanded, "check"):
            typer.echo(f"# {note}")
    typer.echo(resolved_toml(config))


def explain_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SETTING]...", help="Names of settings, as key or section.key, or of sections."),
    ] = None,
) -> None:
    """Describe settings: allowed values, default and meaning. Without a name, describe every setting."""
    from offbeat.common.settings.loading import explain
    from offbeat.lab.terminal import page

    page("\n\n".join(explain(name) for name in names or [None]))


def environments_command(
    python: Annotated[
        str, typer.Option(help="Also look for frameworks and their environments in this Python (environment.python).")
    ] = "",
) -> None:
    """List the available environments: functions in this folder, frameworks, and their packages."""
    from offbeat.common.settings.config import FRAMEWORKS
    from offbeat.deploy.local.environments import find_environments

    found = find_environments(python)
    for one in found:
        lines = "\n    ".join(one.setting.splitlines())
        typer.echo(f"{one.name}: {one.about or 'no description'}\n    {lines}")
    missing = sorted(set(FRAMEWORKS) - {one.name for one in found})
    if missing:
        typer.echo(
            f"Frameworks without a package here: {', '.join(missing)}\n"
            "    environment.requirements names a file of packages, which offbeat installs into a Python of their own;\n"
            "    harbor and nemo_gym need none: docs/environments.md"
        )
    typer.echo("`offbeat new environment NAME` writes an environment that you can change.")


def new_command(
    kind: Annotated[Literal["environment"], typer.Argument(help="What to write.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new folder.")],
) -> None:
    """Write a folder with a new environment: code, data, config and test. It trains as it is."""
    from offbeat.deploy.local.environments import write_environment

    folder = write_environment(name)
    typer.echo(f"{folder}/ is written. Try it: offbeat train {folder}/run.toml")


def calibrate_command(
    arguments: Arguments = None,
    groups: Annotated[int, typer.Option(min=2, help="Groups to sample.")] = 128,
    out: Annotated[Path | None, typer.Option(help="Folder for the result. [default: runs/calibrate-TIME]")] = None,
    reuse: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Do not sample: score what this run sampled with its initial weights.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the calibration as JSON.")] = False,
) -> None:
    """Measure how much engine and learner log-probs differ at lag 0, and recommend a clip range above that noise."""
    from offbeat.common.processes.environment import prepare_environment
    from offbeat.common.processes.shutdown import StopRequest
    from offbeat.common.settings.loading import refuse_masked
    from offbeat.deploy.checks.preflight import look
    from offbeat.deploy.local.quickstart.prepared import expand

    configure_logs("calibrate")
    prepare_environment()
    config = expand(load_config(arguments, default=QUICKSTART))
    refuse_masked(config)
    folder = out or Path(f"runs/calibrate-{start_time()}")
    config = replace(config, run=replace(config.run, dir=str(folder), resume=False))
    look(config, "train")
    # Imported last: torch takes seconds, and a mistake in the config is reported before.
    from offbeat.deploy.local.calibrating import calibrate, collect
    from offbeat.lab.calibration import print_calibration

    if reuse is None:
        status = collect(config, groups, StopRequest().install())
        if status:
            raise typer.Exit(status)
    print_calibration(calibrate(config, reuse or folder), folder, as_json=as_json)


def keygen_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the key files.")],
    actors: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ACTOR]...", help="Names of actors. A name that ends in * is for a fleet that shares one key."),
    ] = None,
    operators: Annotated[
        list[str] | None, typer.Option("--operator", metavar="NAME", help="Name of an additional operator.")
    ] = None,
) -> None:
    """Generate the keys that learner and actors use to recognize each other, needed for more than one machine."""
    from offbeat.deploy.local.keygen import instructions, make_keys

    typer.echo(instructions(folder, make_keys(folder, actors or [], operators or [])))
