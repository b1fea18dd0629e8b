"""The commands that read what runs left in their folders."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from offbeat.common.errors import SettingError
from offbeat.common.records.logs import configure_logs
from offbeat.deploy.cli.arguments import RunFolder, say_page


def report_command(run: RunFolder) -> None:
    """Write RUN/report.html: one self-contained page about the run."""
    from offbeat.lab.report.run_report import write_report

    say_page(write_report(run))


def runs_command(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Folders that hold runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the runs in runs/ or in other folders, the newest last: state, steps, reward, duration and health."""
    from offbeat.lab.run_summary import list_runs, render_runs
    from offbeat.lab.terminal import print_result

    folders = folders or [Path("runs")]
    runs = list_runs(folders, time.time())
    if not runs and not as_json:
        told = " ".join(map(str, folders))
        raise SettingError("FOLDER", told, "there is no run in it", "Name a folder that holds the folders of runs.")
    print_result(runs, render_runs(runs), as_json=as_json)


def compare_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="File to write the page to.")] = Path("comparison.html"),
) -> None:
    """Write one self-contained page that compares runs: their curves in one plot, and the settings that differ."""
    from offbeat.lab.sweep.comparison import write_comparison

    say_page(write_comparison(runs, out))


def samples_command(
    run: RunFolder,
    worst: Annotated[bool, typer.Option("--worst", help="Groups with the lowest reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Groups with the highest reward first.")] = False,
    step: Annotated[int | None, typer.Option(metavar="N", help="Only groups of this optimizer step, counted from 1.")] = None,
    prompt: Annotated[int | None, typer.Option(metavar="ID", help="Only groups of the prompt with this id.")] = None,
    groups: Annotated[int, typer.Option(min=1, help="Groups to show.")] = 4,
    completions: Annotated[int, typer.Option(min=1, help="Completions to show per group.")] = 4,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Show completions of held-out prompts; --step is the evaluated version.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long texts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the groups as JSON, with full texts.")] = False,
) -> None:
    """Show prompts and completions that a run trained on or evaluated, the newest first. The run may still be going."""
    from offbeat.lab import samples
    from offbeat.lab.terminal import print_json, stdout_console

    if worst and best:
        raise SettingError("--worst", "", "it contradicts --best", "Give one of them.")
    order = "worst" if worst else "best" if best else "newest"
    request = samples.SamplesRequest(order, step, prompt, groups, completions)
    read = samples.read_evaluation_samples if evaluation else samples.read_samples
    found = read(run, request)
    if as_json:
        print_json(found)
    else:
        samples.print_samples(stdout_console(), found, full=full)


def trace_command(
    run: RunFolder,
    lease: Annotated[int | None, typer.Option(metavar="N", help="Only the lease with this id.")] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Only the groups of this optimizer step, counted from 1.")
    ] = None,
    slowest: Annotated[int, typer.Option(min=1, help="Number of slowest groups to show, without --lease and --step.")] = 20,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send the spans to this OTLP collector instead, as http://HOST:4318.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write. [default: RUN/trace.json]")] = None,
) -> None:
    """Write a trace of groups for ui.perfetto.dev: the wait, generation, reward, queue and training of each."""
    from offbeat.lab.tracing import TRACE_FILE, read_trace, send_trace, write_trace

    if lease is not None and step is not None:
        raise SettingError("--lease", lease, "it contradicts --step", "Give one of them.")
    trace = read_trace(run, lease=lease, step=step, slowest=slowest)
    if otlp is not None:
        typer.echo(f"{send_trace(trace, otlp)} spans sent to {otlp}")
        return
    typer.echo(write_trace(trace, out or run / TRACE_FILE))


def drift_command(
    run: RunFolder, as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False
) -> None:
    """Show how staleness affected a run: the drift at each policy lag, and any bias in the groups trained on."""
    from offbeat.lab.drift import print_drift

    print_drift(run, as_json=as_json)


def audit_command(run: RunFolder) -> None:
    """Follow every lease of a run through its log and report violations; exit status 1 if there are any."""
    from offbeat.common.records.run_folder import read_run_config
    from offbeat.lab.audit import audit, print_checks

    raise typer.Exit(0 if print_checks(audit(run, read_run_config(run))) else 1)


def export_command(
    run: RunFolder,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Optimizer step of the checkpoint. [default: the newest complete one]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to create. [default: RUN/model-step-N, or RUN/adapter-step-N]")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Export only the LoRA adapter, in peft's layout.")] = False,
    pushed: Annotated[
        str, typer.Option("--push", metavar="OWNER/NAME", help="Also upload it to the Hugging Face Hub under this name.")
    ] = "",
    private: Annotated[bool, typer.Option("--private", help="With --push: a new model is visible to its owner alone.")] = False,
) -> None:
    """Save the model of a checkpoint for transformers and vLLM, with a model card. The run may still be going."""
    from huggingface_hub import HfApi

    from offbeat.common.processes.environment import prepare_environment
    from offbeat.lab.export import check_push, export, push

    configure_logs("export")
    hub = HfApi()
    if pushed:
        check_push(pushed, hub)
    prepare_environment()
    folder = export(run, step=step, out=out, only_adapter=adapter)
    typer.echo(folder)
    loads = "peft loads it onto the base model" if adapter else "transformers and vLLM load it by its path"
    typer.echo(f"wrote {folder}; {loads}", err=True)
    if pushed:
        typer.echo(push(folder, pushed, hub, is_private=private))


def serve_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a model folder.")],
    server_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- OPTION...]", help="Options of the engine's server, as of `vllm serve` or `transformers serve`."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Optimizer step of the checkpoint. [default: the newest complete one]")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    engine: Annotated[
        Literal["auto", "vllm", "transformers"], typer.Option(help="auto: vLLM where it is installed, else transformers.")
    ] = "auto",
) -> None:
    """Serve the model of a checkpoint to chat clients and evaluation harnesses, with an OpenAI-compatible API.

    The server is the one that comes with the engine. It answers on this machine alone, unless --host says otherwise. The run
    may still be going.
    """
    from offbeat.actor.engines.openai_server import choose_engine
    from offbeat.common.processes.environment import prepare_environment
    from offbeat.common.processes.shutdown import StopRequest
    from offbeat.deploy.local.serving import Served, check_address, model_folder, serve, server_arguments

    configure_logs("serve")
    stop = StopRequest().install()
    chosen = choose_engine(engine)
    check_address(host, port, chosen)
    prepare_environment()
    with stop.at_once("nothing is served yet"):
        folder, config = model_folder(run, step)
    arguments = [*server_arguments(folder, config, chosen), *(server_options or [])]
    raise typer.Exit(serve(Served(folder, chosen, host, port, arguments), stop))
