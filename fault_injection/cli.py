"""`kvguard campaign`: fault injection, with a table that says what was proven."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from kvguard.fault_injection.plan import CampaignPlan

DEFAULT_SEED = 1


def campaign(
    names: Annotated[
        list[str] | None, typer.Argument(help="With --scenarios: which; all of the engine without a name.")
    ] = None,
    scenarios: Annotated[
        bool, typer.Option("--scenarios", help="Replay public bugs instead: see docs/scenarios.md.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of traffic, faults and tags; the same seed gives the same trials.")
    ] = (DEFAULT_SEED),
    trials: Annotated[
        int | None,
        typer.Option(
            help="Trials in all, dealt evenly over the cells. Default: 216 and 86 of two phases, smollm2 18; in vLLM "
            "84 and 14, in SGLang 96 and 16.",
            min=1,
            show_default=False,
        ),
    ] = None,
    clean_runs: Annotated[
        int | None,
        typer.Option(
            help="Runs without a fault, in which nothing may be flagged. Default: 54 and 18 of two phases, smollm2 6; "
            "in vLLM 24 and 4, in SGLang 24 and 4.",
            min=0,
            show_default=False,
        ),
    ] = None,
    fault: Annotated[
        str, typer.Option(help="NAME[,NAME] or all; `writes`: those of where a step writes; `keys`: of cache keys.")
    ] = "all",
    engine: Annotated[
        str, typer.Option(help="Engine that the faults go into: embedded, vllm or sglang (the real ones, in process).")
    ] = "embedded",
    model: Annotated[
        str | None,
        typer.Option(
            help="recall (default), smollm2, or a folder with a Hugging Face Llama checkpoint; in vLLM and SGLang tiny "
            "(default), smollm2 or such a folder.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[str, typer.Option(help="Kernel backend of the guard: torch, numpy or triton.")] = "torch",
    kv_dtype: Annotated[str, typer.Option(help="NAME[,NAME] or all: fp32, bf16, fp8_e4m3 (or fp8), fp8_e5m2.")] = "all",
    weights: Annotated[str, typer.Option(help="NAME[,NAME] or all: fp32, bf16, int4.")] = "all",
    page_size: Annotated[
        str,
        typer.Option(help="N[,N] or all: tokens in a page, 1 to 64; in vLLM a multiple of 32, in SGLang a power of 2."),
    ] = "all",
    runner: Annotated[str, typer.Option(help="vLLM's model runner: v1, v2 or all.")] = "all",
    scheduling: Annotated[
        str, typer.Option(help="vLLM's scheduling: sync, async or all; SGLang's loop: normal, overlap or all.")
    ] = "all",
    phases: Annotated[
        str,
        typer.Option(help="single: one engine; pd: a prefill and a decode worker with a KV hand-over; all: both."),
    ] = "all",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print results.json on standard output, nothing else.")
    ] = False,
    replay: Annotated[int | None, typer.Option(help="Run one trial of an earlier run again and show it.")] = None,
    run: Annotated[str, typer.Option(help="The earlier run that --replay takes its plan from.")] = "latest",
    runs_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    workers: Annotated[int, typer.Option(help="Processes; 0: one per core.", min=0)] = 0,
) -> None:
    """Break a serving engine's page bookkeeping on purpose and show what the guard does about it.

    Each trial runs the same traffic without the fault, with it and no guard, and with it and the guard. Exit 0: all
    proven; 1: a miss, a false positive or a fault that was not injected; 2: usage; 3: the campaign itself failed.
    """
    from kvguard.fault_injection.options import Options, UsageError, make_plan
    from kvguard.fault_injection.run_folder import RunFolderError

    try:
        if replay is not None:
            raise typer.Exit(_replay(replay, runs_dir / run, as_json))
        options = Options(
            seed=seed,
            trials=trials,
            clean_runs=clean_runs,
            fault=fault,
            engine=engine,
            model=model,
            backend=backend,
            kv_dtype=kv_dtype,
            weights=weights,
            page_size=page_size,
            runner=runner,
            scheduling=scheduling,
            phases=phases,
        )
        if names and not scenarios:
            raise UsageError(f"what is {names[0]!r}? names are those of scenarios: they go with --scenarios")
        if scenarios:
            from kvguard.fault_injection.scenarios.plan import scenario_plan

            plan = scenario_plan(options, names or ())
        else:
            plan = make_plan(options)
        raise typer.Exit(_campaign(plan, runs_dir, workers, as_json))
    except (RunFolderError, UsageError) as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    """One clear line, exit 2."""
    typer.echo(f"kvguard campaign: {message}", err=True)
    raise typer.Exit(2)


def _campaign(plan: CampaignPlan, runs_dir: Path, workers: int, as_json: bool) -> int:
    import signal
    import time
    import traceback
    from concurrent.futures.process import BrokenProcessPool

    import jinja2  # noqa: F401  (the report needs it: better to learn of that now than after the last trial)

    from kvguard.fault_injection.campaign import Result, default_workers, prepare_backend, run_campaign
    from kvguard.fault_injection.html_report import report_html
    from kvguard.fault_injection.junit import junit_xml
    from kvguard.fault_injection.plan import SCENARIO_LEVEL
    from kvguard.fault_injection.results import results_json
    from kvguard.fault_injection.run_folder import (
        ENGINE_LOG,
        FAILURE,
        JUNIT,
        PLAN,
        REPORT,
        RESULTS,
        RunFolder,
        RunFolderError,
        plan_toml,
    )
    from kvguard.fault_injection.terminal import Progress, show_results

    folder = RunFolder(runs_dir, plan.seed)
    started, done = time.monotonic(), 0
    total = len(plan.trials) + len(plan.clean_runs)
    # A cancelled CI job or a closed terminal stops like Ctrl-C: workers end, the history stays.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    try:
        if said := prepare_backend(plan):
            typer.echo(f"kvguard campaign: {said}", err=True)
        folder.write(PLAN, plan_toml(plan))
        with Progress(total) as advance:

            def on_result(result: Result) -> None:
                nonlocal done
                done += 1
                folder.append(result.to_json())
                advance()

            results = run_campaign(
                plan, workers=workers or default_workers(), on_result=on_result, engine_log=folder.path / ENGINE_LOG
            )
        meta = {**_meta(plan, time.monotonic() - started), "run": folder.name}
        data = results_json(results, meta)
        if plan.trials and plan.trials[0].cell.level == SCENARIO_LEVEL:
            from kvguard.fault_injection.scenarios.plan import scenario_records

            data["scenarios"] = scenario_records(results)
        folder.write(RESULTS, json.dumps(data, indent=2) + "\n")
        folder.write(JUNIT, junit_xml(results))
        folder.write(REPORT, report_html(results, data))
        final = folder.complete()
    except KeyboardInterrupt:
        typer.echo(f"kvguard campaign: interrupted after {done} of {total}; history in {folder.path}", err=True)
        return 130
    except BrokenProcessPool:
        typer.echo(
            f"kvguard campaign: a worker died after {done} of {total} (out of memory?); history in {folder.path}",
            err=True,
        )
        return 3
    except RunFolderError:
        raise
    except Exception as error:
        # The trials that were run are in the history; what they would have shown together is not known.
        folder.write(FAILURE, traceback.format_exc())
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        typer.echo(f"kvguard campaign: failed after {done} of {total}: {what}; see {folder.path / FAILURE}", err=True)
        return 3
    finally:
        folder.close()
    verdict = 0 if results.all_proven else 1
    try:
        if as_json:
            typer.echo(json.dumps(data, indent=2))
        else:
            show_results(results, data, final)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; the verdict stands.
        _silence_stdout()
    except OSError as error:
        typer.echo(f"kvguard campaign: cannot print the results: {error.strerror}; they are in {final}", err=True)
        _silence_stdout()
        return 3
    return verdict


def _silence_stdout() -> None:
    """Nobody reads standard output any more, or it cannot be written: the flush at exit must not complain again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _meta(plan: CampaignPlan, wall_s: float) -> dict[str, Any]:
    import platform
    import shlex

    from kvguard import __version__

    return {
        "seed": plan.seed,
        "engine": plan.engine,
        "model": plan.model,
        "backend": plan.backend,
        "command": shlex.join(["kvguard", *sys.argv[1:]]),
        "kvguard": __version__,
        "python": platform.python_version(),
        "wall_s": round(wall_s, 1),
        "left_out": list(plan.left_out),
    }


def _replay(index: int, folder: Path, as_json: bool) -> int:
    """Run trial `index` of an earlier run again; exit 1 if it is not proven."""
    from dataclasses import replace

    from kvguard.config import GuardConfig
    from kvguard.fault_injection.campaign import run_campaign
    from kvguard.fault_injection.options import check_backend_runs, check_embedded_model, check_vllm
    from kvguard.fault_injection.plan import SCENARIO_LEVEL
    from kvguard.fault_injection.run_folder import read_plan
    from kvguard.fault_injection.sglang_options import check_sglang
    from kvguard.fault_injection.terminal import trial_line

    GuardConfig.load()
    plan = read_plan(folder)
    trial = next((trial for trial in plan.trials if trial.index == index), None)
    if trial is None:
        _refuse(f"run {folder} has no trial {index}: it has 0 to {len(plan.trials) - 1}")
    alone = replace(plan, trials=(trial,), clean_runs=())
    if trial.cell.level == SCENARIO_LEVEL:
        from kvguard.fault_injection.scenarios.plan import check_releases
        from kvguard.fault_injection.scenarios.registry import SCENARIOS

        check_releases(plan.engine, [SCENARIOS[trial.cell.fault]])
    elif plan.engine == "vllm":
        check_vllm(alone)
    elif plan.engine == "sglang":
        check_sglang(alone)
    else:
        check_embedded_model(plan.model, trial.cell.weights)
        check_backend_runs(plan.backend)
    result = run_campaign(alone, workers=1).trials[0]
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        typer.echo(trial_line(result))
        typer.echo(f"injected at step {result.injected_step}: {result.description}")
        typer.echo(
            f"live at step {result.live_step}, detected at step {result.detected_step} by "
            f"{', '.join(result.detected_by) or 'nothing'} ({', '.join(result.kinds)})"
        )
        if result.leak is not None:
            typer.echo(f"no fault  {result.leak.golden!r}")
            typer.echo(f"guard off {result.leak.guard_off!r}")
            typer.echo(f"guard on  {result.leak.guard_on!r}")
        typer.echo(result.report)
    return 0 if result.proven or result.outcome == "unsupported" else 1
