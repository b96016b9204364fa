"""From the options of `kvguard campaign` to a plan; everything that is wrong with them is said here, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.plan import (
    ENGINES,
    KV_DTYPES,
    PAGE_SIZES,
    RUNNERS,
    SCHEDULINGS,
    VLLM_KV_DTYPES,
    VLLM_PAGE_SIZES,
    WEIGHTS,
    CampaignPlan,
    build_plan,
    build_vllm_plan,
)

ALIASES = {"fp8": "fp8_e4m3"}
DEFAULT_COUNTS = {"embedded": (216, 54), "vllm": (84, 24), "vllm smollm2": (14, 4)}
"""Engine, and model where it matters, -> trials and clean runs."""
VLLM_MISSING = (
    "vLLM is not installed here: run `make env-vllm`, then `.venv-vllm/bin/kvguard campaign --engine vllm`, "
    "or both as `make campaign-vllm`"
)


class UsageError(ValueError):
    """An option that cannot be; the message is one line and says what can."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """As given on the command line; None where nothing was given and the engine decides."""

    seed: int
    trials: int | None
    clean_runs: int | None
    fault: str
    engine: str
    model: str | None
    backend: str
    kv_dtype: str
    weights: str
    page_size: str
    runner: str
    scheduling: str


def make_plan(options: Options) -> CampaignPlan:
    """The plan. Raises UsageError, or ConfigError for a guard configuration that the guard would refuse."""
    from kvguard.config import GuardConfig
    from kvguard.kernels.backend import BACKENDS

    # A configuration that the guard would refuse is refused here too, before anything runs.
    GuardConfig.load()
    if options.engine not in ENGINES:
        raise UsageError(f"unknown engine {options.engine!r}: this release has {', '.join(ENGINES)}")
    if options.backend not in BACKENDS:
        raise UsageError(f"unknown backend {options.backend!r}: this release has {', '.join(BACKENDS)}")
    return _vllm_plan(options) if options.engine == "vllm" else _embedded_plan(options)


def _counts(options: Options, kind: str) -> tuple[int, int]:
    trials, clean_runs = DEFAULT_COUNTS[kind]
    return (
        trials if options.trials is None else options.trials,
        clean_runs if options.clean_runs is None else options.clean_runs,
    )


def _embedded_plan(options: Options) -> CampaignPlan:
    if (options.runner, options.scheduling) != ("all", "all"):
        raise UsageError("--runner and --scheduling are vLLM's: they go with --engine vllm")
    trials, clean_runs = _counts(options, "embedded")
    model = options.model or "recall"
    weights = _choose("weights", options.weights, WEIGHTS)
    check_embedded_model(model, weights[0])
    return build_plan(
        seed=options.seed,
        trials=trials,
        clean_runs=clean_runs,
        engine=options.engine,
        # Absolute, so that a replay finds it from any folder.
        model=model if model == "recall" else str(Path(model).resolve()),
        backend=options.backend,
        faults=_choose("fault", options.fault, tuple(PAGE_FAULTS)),
        kv_dtypes=_choose("KV dtype", options.kv_dtype, KV_DTYPES),
        weights=weights,
        page_sizes=_page_sizes(options.page_size, PAGE_SIZES, range(1, 65), "1 to 64 tokens"),
    )


def _vllm_plan(options: Options) -> CampaignPlan:
    if options.backend != "torch":
        raise UsageError(f"--backend {options.backend}: in vLLM the guard checks with torch")
    model = options.model or "tiny"
    faults = _choose("fault", options.fault, tuple(PAGE_FAULTS))
    kv_dtypes = _choose("KV dtype", options.kv_dtype, KV_DTYPES, everything=VLLM_KV_DTYPES)
    weights = _choose("weights", options.weights, WEIGHTS)
    runners = _choose("runner", options.runner, RUNNERS)
    schedulings = _choose("scheduling", options.scheduling, SCHEDULINGS)
    page_sizes = _page_sizes(options.page_size, VLLM_PAGE_SIZES, range(32, 129, 32), "32, 64, 96 or 128 tokens in vLLM")
    trials, clean_runs = _counts(options, "vllm smollm2" if model == "smollm2" else "vllm")
    try:
        plan = build_vllm_plan(
            seed=options.seed,
            trials=trials,
            clean_runs=clean_runs,
            model=model if model in ("tiny", "smollm2") else str(Path(model).resolve()),
            faults=faults,
            kv_dtypes=kv_dtypes,
            weights=weights,
            page_sizes=page_sizes,
            runners=runners,
            schedulings=schedulings,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    check_vllm(plan)
    return plan


def check_vllm(plan: CampaignPlan) -> None:
    """vLLM and the models of the plan are there. Raises UsageError."""
    from importlib.util import find_spec

    from kvguard.fault_injection.targets.vllm_models import model_folder

    for weights in sorted({job.weights for job in plan.clean_runs} | {trial.cell.weights for trial in plan.trials}):
        if plan.model == "tiny":
            break
        try:
            folder = model_folder(plan.model, weights)
        except FileNotFoundError as error:
            raise UsageError(str(error)) from None
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"no model {plan.model!r}: give tiny, smollm2 or a folder with a Hugging Face Llama checkpoint"
            )
    if find_spec("vllm") is None:
        raise UsageError(VLLM_MISSING)


def check_embedded_model(model: str, weights: str) -> None:
    """Load the model once up front: a worker's traceback is no way to learn of a wrong path. Raises UsageError."""
    from kvguard.fault_injection.targets.embedded_runs import check_model

    try:
        check_model(model, weights)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"no model {model!r}: {error}; give recall or a folder with a Hugging Face Llama checkpoint"
        ) from None
    except Exception as error:
        # Whatever a broken checkpoint makes the loader raise, it is the checkpoint that is wrong.
        raise UsageError(
            f"cannot use model {model!r}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from None


def _choose(
    option: str, given: str, valid: Sequence[str], *, everything: Sequence[str] | None = None
) -> tuple[str, ...]:
    """The values of a NAME[,NAME] | all option, in the order of `valid`; `everything`: what `all` stands for."""
    if given == "all":
        return tuple(everything or valid)
    names = [ALIASES.get(name.strip(), name.strip()) for name in given.split(",") if name.strip()]
    for name in names:
        if name not in valid:
            raise UsageError(f"unknown {option} {name!r}: choose from {', '.join(valid)}, or all")
    if not names:
        raise UsageError(f"no {option} given: choose from {', '.join(valid)}, or all")
    return tuple(name for name in valid if name in names)


def _page_sizes(given: str, everything: Sequence[int], valid: range, words: str) -> tuple[int, ...]:
    if given == "all":
        return tuple(everything)
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in given.split(",")))
    except ValueError:
        raise UsageError(
            f"--page-size {given!r} is not a number or a list of numbers, for example 16 or 1,64"
        ) from None
    if any(size not in valid for size in sizes):
        raise UsageError(f"--page-size {given}: the campaign's prompts fill pages of {words}")
    return sizes
