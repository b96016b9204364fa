"""`kvguard plan`: how many tokens, pages and requests fit, and what the guard takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from kvguard.model_shape import ModelShape
    from kvguard.plan import Plan, PlanInputs

SHOWN_MAX = 100
"""Characters of a mistake that a message repeats."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def plan(
    model: Annotated[
        str, typer.Argument(help="A config.json, a folder that holds one, or a name; without: what names there are.")
    ] = "",
    kv_dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp8.")] = "bf16",
    weights: Annotated[str, typer.Option(help="bf16, fp8 (blocks of 128) or int4 (routed experts, or all).")] = "bf16",
    rest: Annotated[
        str | None,
        typer.Option(
            help="bf16 or fp8: a mixture of experts' other matrices; default: fp8 if --weights is, else bf16.",
            show_default=False,
        ),
    ] = None,
    int4_group: Annotated[int, typer.Option(help="Weights that share an INT4 scale.", min=1)] = 32,
    draft: Annotated[bool, typer.Option("--draft", help="Load multi-token prediction layers too.")] = False,
    gpus: Annotated[int, typer.Option(help="Tensor-parallel GPUs.", min=1)] = 1,
    gpu_memory: Annotated[str, typer.Option(help="Of one GPU: 80GB, 141GB, 192GiB.")] = "80GB",
    utilization: Annotated[float, typer.Option(help="Part of it that the engine may use.")] = 0.9,
    reserve: Annotated[str, typer.Option(help="Of that, for activations, graphs and buffers.")] = "0",
    kv_memory: Annotated[
        str | None, typer.Option(help="Of one GPU, in place of what weights leave.", show_default=False)
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens in a page.", min=1)] = 16,
    context: Annotated[int, typer.Option(help="Tokens of a request, prompt and answer.", min=1)] = 8192,
    requests: Annotated[int, typer.Option(help="Requests that may run at once.", min=1)] = 256,
    step_tokens: Annotated[int, typer.Option(help="Tokens that a step computes at most.", min=1)] = 8192,
    recorder_events: Annotated[int, typer.Option(help="recorder_events_per_page of the guard.", min=0)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Work out tokens, pages, requests and the guard's memory from a model's config.json."""
    from kvguard.model_shape import read_shape
    from kvguard.plan import PlanInputs, make_plan

    try:
        inputs = PlanInputs(
            kv_dtype=kv_dtype,
            weights=weights,  # type: ignore[arg-type]
            rest=rest,  # type: ignore[arg-type]
            int4_group=int4_group,
            draft=draft,
            gpus=gpus,
            gpu_bytes=_bytes(gpu_memory),
            utilization=utilization,
            reserve_bytes=_bytes(reserve),
            kv_bytes=None if kv_memory is None else _bytes(kv_memory),
            page_size=page_size,
            context_tokens=context,
            requests_max=requests,
            step_tokens=step_tokens,
            recorder_events=recorder_events,
        )
        shape = read_shape(_config_of(model), model)
        found = make_plan(shape, inputs)
    except ValueError as error:
        _refuse(str(error))
    if as_json:
        import dataclasses
        import json

        content = {"model": model, "parameters": shape.parameters, "inputs": dataclasses.asdict(inputs)}
        guard = dataclasses.asdict(found.guard) | {"device": found.guard.device}
        typer.echo(json.dumps(content | dataclasses.asdict(found) | {"guard": guard}, indent=2))
        return
    _show(shape, inputs, found)


def _config_of(model: str) -> dict[str, Any]:
    """The content of a config.json, given by path, folder or name. ValueError."""
    import json

    from kvguard.known_models import KNOWN_MODELS

    if model.lower() in KNOWN_MODELS:
        return dict(KNOWN_MODELS[model.lower()])
    try:
        path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
        is_there = bool(model) and path.is_file()
    except (OSError, ValueError):  # too long for a path, or not to be looked at
        is_there = False
    if not is_there:
        shown = repr(model if len(model) <= SHOWN_MAX else f"{model[:SHOWN_MAX]}...")
        raise ValueError(f"no model {shown}: give a config.json, its folder, or one of {', '.join(KNOWN_MODELS)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def _bytes(text: str) -> int:
    """`80GB` is 80e9, `80GiB` 80 * 2^30; a plain number is bytes."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match.group(2).upper() not in _UNITS:
        shown = repr(text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}...")
        raise ValueError(f"{shown} is no amount of memory: write 80GB or 80GiB")
    return round(float(match.group(1)) * _UNITS[match.group(2).upper()])


def _refuse(message: str) -> NoReturn:
    typer.echo(f"kvguard plan: {message}", err=True)
    raise typer.Exit(2)


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} B"


def _show(shape: ModelShape, inputs: PlanInputs, found: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", f"{inputs.gpus} GPU{'s' * (inputs.gpus > 1)}", box=None, show_header=False)
    table.add_row("parameters", f"{shape.parameters / 1e9:,.2f} billion")
    table.add_row("weights", f"{_size(found.weights_bytes)} a GPU, {_size(found.weights_all_bytes)} in all")
    table.add_row("KV memory", f"{_size(found.kv_bytes)} a GPU, {inputs.kv_dtype}")
    for pool in found.pools:
        seen = "all tokens" if pool.window is None else f"a window of {pool.window}"
        table.add_row(
            f"{pool.layers} layers, {seen}",
            f"{pool.bytes_per_token:,} B a token; {pool.pages:,} pages of {inputs.page_size} ({pool.page_bytes:,} B)",
        )
    if found.tokens is not None:
        table.add_row("tokens", f"{found.tokens:,}")
    table.add_row(f"requests of {inputs.context_tokens:,} tokens", f"{found.requests:,}")
    guard = found.guard
    table.add_row(
        "guard, on each GPU",
        f"{_size(guard.device)} ({100 * guard.device / found.kv_bytes:.3f} % of the KV memory): tags and writers "
        f"{_size(guard.page_tag + guard.page_writer)}, record {_size(guard.record)}, "
        f"delta {_size(guard.delta)}, evidence {_size(guard.evidence)}",
    )
    table.add_row("guard, on the host", f"{_size(guard.host)} with every page in use")
    console = Console()
    console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
