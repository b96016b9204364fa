"""From the options of `kvguard campaign` to a plan; everything that is wrong with them is said here, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.faults.transfers import TRANSFER_FAULTS
from kvguard.fault_injection.models import SMOLLM2, smollm2_folder
from kvguard.fault_injection.phases_plan import add_phases, phase_pairs, phase_storage
from kvguard.fault_injection.plan import (
    ENGINES,
    KV_DTYPES,
    PAGE_SIZES,
    PHASES,
    RUNNERS,
    SCHEDULINGS,
    SMOLLM2_KV_DTYPES,
    SMOLLM2_PAGE_SIZES,
    SMOLLM2_WEIGHTS,
    VLLM_KV_DTYPES,
    VLLM_PAGE_SIZES,
    WEIGHTS,
    CampaignPlan,
    build_plan,
    build_vllm_plan,
)

ALIASES = {"fp8": "fp8_e4m3"}
DEFAULT_COUNTS = {
    "embedded": (216, 54),
    "embedded smollm2": (18, 6),
    "vllm": (84, 24),
    "vllm smollm2": (14, 4),
    "vllm writes": (120, 12),
    "vllm keys": (108, 12),
    "sglang": (96, 24),
    "sglang smollm2": (16, 4),
    "sglang writes": (96, 12),
    "sglang keys": (80, 16),
}
"""Engine, and model where it matters, -> trials and clean runs. Those of two phases come on top."""
PHASE_COUNTS = (54, 32, 18)
"""Of two phases: trials of page faults after a hand-over, of faults of the hand-over, and clean runs."""
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
    phases: str = "all"


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
    check_backend_runs(options.backend)
    if options.engine == "sglang":
        from kvguard.fault_injection.sglang_options import sglang_plan

        return sglang_plan(options)
    return _vllm_plan(options) if options.engine == "vllm" else _embedded_plan(options)


def counts_of(options: Options, kind: str) -> tuple[int, int]:
    trials, clean_runs = DEFAULT_COUNTS[kind]
    return (
        trials if options.trials is None else options.trials,
        clean_runs if options.clean_runs is None else options.clean_runs,
    )


def _embedded_plan(options: Options) -> CampaignPlan:
    if (options.runner, options.scheduling) != ("all", "all"):
        raise UsageError(
            "--runner and --scheduling are of real engines: they go with --engine vllm, --scheduling also with sglang"
        )
    from kvguard.fault_injection.key_options import keys_plan, named_keys
    from kvguard.fault_injection.write_options import named_writes, writes_plan

    if named_keys(options.fault):
        return keys_plan(options)
    if named_writes(options.fault):
        return writes_plan(options)
    model = options.model or "recall"
    real = model == SMOLLM2
    weights = choose("weights", options.weights, WEIGHTS, everything=SMOLLM2_WEIGHTS if real else WEIGHTS)
    kv_dtypes = choose("KV dtype", options.kv_dtype, KV_DTYPES, everything=SMOLLM2_KV_DTYPES if real else KV_DTYPES)
    page_sizes = choose_page_sizes(
        options.page_size, SMOLLM2_PAGE_SIZES if real else PAGE_SIZES, range(1, 65), "1 to 64 tokens"
    )
    faults = choose("fault", options.fault, tuple(PAGE_FAULTS) if real else (*PAGE_FAULTS, *TRANSFER_FAULTS))
    page_faults = tuple(fault for fault in faults if fault in PAGE_FAULTS)
    if real and options.phases not in ("all", "single"):
        raise UsageError(f"--phases {options.phases}: smollm2 runs in one phase; two phases have the recall model")
    phases = _phases("single" if real else options.phases, faults, kv_dtypes, weights)
    for each in weights if real else weights[:1]:
        check_embedded_model(model, each)
    counts = DEFAULT_COUNTS["embedded smollm2" if real else "embedded"]
    single, after, during = _shares(options.trials, counts[0], phases, faults)
    clean_single, clean_after, _ = _shares(options.clean_runs, counts[1], phases, faults, clean=True)
    plan = build_plan(
        seed=options.seed,
        trials=single,
        clean_runs=clean_single,
        engine=options.engine,
        # Absolute, so that a replay finds it from any folder.
        model=model if model in ("recall", SMOLLM2) else str(Path(model).resolve()),
        backend=options.backend,
        faults=page_faults,
        kv_dtypes=kv_dtypes,
        weights=weights,
        page_sizes=page_sizes,
    )
    return add_phases(
        plan,
        page_trials=after,
        transfer_trials=during,
        clean_runs=clean_after,
        faults=faults,
        storage=phase_storage(kv_dtypes, weights),
        page_sizes=page_sizes,
    )


def _phases(given: str, faults: Sequence[str], kv_dtypes: Sequence[str], weights: Sequence[str]) -> tuple[str, ...]:
    """Which phases these faults and storages leave; UsageError if none, or if two phases were asked for in vain."""
    phases = choose("phases", given, PHASES)
    if not any(phase_pairs(faults)):
        name = next(fault for fault in faults if fault in TRANSFER_FAULTS)
        raise UsageError(f"fault {name!r} is not covered by this release: {TRANSFER_FAULTS[name].uncovered}")
    if not any(fault in PAGE_FAULTS for fault in faults):
        if "pd" not in phases:
            raise UsageError(f"fault {faults[0]!r} is one of two phases: it goes with --phases pd, or all")
        phases = ("pd",)
    if "pd" in phases and not phase_storage(kv_dtypes, weights):
        if phases == ("pd",):
            fitting = "; ".join(f"{kv} with {weight}" for kv, weight in phase_storage(KV_DTYPES, WEIGHTS))
            raise UsageError(f"no decode worker has these KV dtypes and weights: two phases have {fitting}")
        phases = ("single",)
    return phases


def _shares(
    given: int | None, single: int, phases: Sequence[str], faults: Sequence[str], *, clean: bool = False
) -> tuple[int, int, int]:
    """How many trials (or clean runs) have one phase, two with a page fault, two with a fault of the hand-over.

    `single`: how many have one phase by default. A number that was given is shared out in the proportions of the
    default.
    """
    pages, transfers = phase_pairs(faults)
    counts = [
        single if "single" in phases else 0,
        (PHASE_COUNTS[2] if clean else PHASE_COUNTS[0] if pages else 0) if "pd" in phases else 0,
        (0 if clean or not transfers else PHASE_COUNTS[1]) if "pd" in phases else 0,
    ]
    if given is None:
        return counts[0], counts[1], counts[2]
    total = sum(counts)
    during = given * counts[2] // total
    after = given * (counts[1] + counts[2]) // total - during
    return given - after - during, after, during


def _vllm_plan(options: Options) -> CampaignPlan:
    if options.phases not in ("all", "single"):
        raise UsageError("--phases: prefill and decode worker are the embedded engine's, not vLLM's")
    if options.backend != "torch":
        raise UsageError(f"--backend {options.backend}: in vLLM the guard checks with torch")
    model = options.model or "tiny"
    from kvguard.fault_injection.key_options import VLLM_KEY_SETTINGS, vllm_key_faults
    from kvguard.fault_injection.targets.vllm_writes import NOT_IN_VLLM, VLLM_WRITE_FAULTS
    from kvguard.fault_injection.write_options import engine_faults

    keys = vllm_key_faults(options.fault)
    faults = keys or engine_faults(
        options.fault, "vLLM", pages=PAGE_FAULTS, writes=VLLM_WRITE_FAULTS, absent=NOT_IN_VLLM
    )
    if keys and model != "tiny":
        raise UsageError(f"--model {model}: wrong keys go into the tiny model, whose weights can be changed for others")
    kv_dtypes = choose("KV dtype", options.kv_dtype, KV_DTYPES, everything=VLLM_KV_DTYPES)
    weights = choose("weights", options.weights, WEIGHTS)
    kv_dtypes, without_kv = _runnable(options.kv_dtype, kv_dtypes)
    # A tiny model has no INT4 weights to leave out.
    weights, without_weights = (weights, ()) if model == "tiny" else _runnable(options.weights, weights)
    runners = choose("runner", options.runner, RUNNERS)
    schedulings = choose("scheduling", options.scheduling, SCHEDULINGS)
    words = "32, 64, 96 or 128 tokens in vLLM"
    page_sizes = choose_page_sizes(options.page_size, VLLM_PAGE_SIZES, range(32, 129, 32), words)
    kind = "vllm smollm2" if model == "smollm2" else "vllm"
    if kind == "vllm" and not any(fault in PAGE_FAULTS for fault in faults):
        kind = "vllm keys" if keys else "vllm writes"
    trials, clean_runs = counts_of(options, kind)
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
            **(VLLM_KEY_SETTINGS if keys else {}),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    check_vllm(plan)
    return replace(plan, left_out=without_kv + without_weights)


def _runnable(given: str, chosen: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What vLLM runs on this CPU, and why not the rest. UsageError for what was asked for by name and it does not."""
    from kvguard.fault_injection.targets.vllm_cpu import cannot_run

    reasons = cannot_run()
    refused = [name for name in chosen if name in reasons]
    if refused and given != "all":
        raise UsageError(f"{refused[0]} cannot run here: {reasons[refused[0]]}")
    return (
        tuple(name for name in chosen if name not in reasons),
        tuple(dict.fromkeys(f"{name}: {reasons[name]}" for name in refused)),
    )


def check_backend_runs(backend: str) -> None:
    """The backend runs on the CPU, where the embedded engine is. Raises UsageError."""
    from importlib.util import find_spec

    if backend == "cupy":
        raise UsageError("--backend cupy checks tensors on a GPU, and the engines of a campaign run on the CPU")
    if backend == "triton" and find_spec("triton") is None:
        raise UsageError("--backend triton: Triton is not installed here: pip install 'kvguard[triton]'")


def check_vllm(plan: CampaignPlan) -> None:
    """vLLM and the models of the plan are there. Raises UsageError."""
    from importlib.util import find_spec

    check_checkpoints(plan, {job.weights for job in plan.clean_runs} | {trial.cell.weights for trial in plan.trials})
    if find_spec("vllm") is None:
        raise UsageError(VLLM_MISSING)


def check_checkpoints(plan: CampaignPlan, wanted: set[str]) -> None:
    """The plan's model is there with each of the `wanted` weights. Raises UsageError."""
    from kvguard.fault_injection.targets.checkpoints import model_folder

    for weights in sorted(wanted):
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


def check_embedded_model(model: str, weights: str) -> None:
    """Load the model once up front: a worker's traceback is no way to learn of a wrong path. Raises UsageError.

    SmolLM2 is only looked for: it was checked when it was prepared, and this process need not hold it.
    """
    from kvguard.fault_injection.targets.embedded_runs import check_model

    try:
        if model == SMOLLM2:
            smollm2_folder("int4" if weights == "int4" else "bf16")
        else:
            check_model(model, weights)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            str(error)
            if model == SMOLLM2
            else f"no model {model!r}: {error}; give recall, smollm2 or a folder with a Hugging Face Llama checkpoint"
        ) from None
    except Exception as error:
        # Whatever a broken checkpoint makes the loader raise, it is the checkpoint that is wrong.
        raise UsageError(
            f"cannot use model {model!r}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from None


def choose(
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


def choose_page_sizes(given: str, everything: Sequence[int], valid: Sequence[int], words: str) -> tuple[int, ...]:
    """The same of numbers; `words`: what `valid` is, for the reader."""
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
