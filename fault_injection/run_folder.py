"""runs/<time>-<seed>/: where a campaign leaves its plan, history, results and reports.

A run is written to a folder that ends in `.partial` and renamed once it is complete; `latest` moves last. Earlier runs
are never touched, and a run that was interrupted keeps its history under the partial name.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import sys
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import IO, Any

from kvguard.fault_injection.faults.keys import KEY_FAULTS
from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.faults.transfers import TRANSFER_FAULTS
from kvguard.fault_injection.faults.write_fault import WRITE_PROOF_SETS
from kvguard.fault_injection.faults.writes import WRITE_FAULTS
from kvguard.fault_injection.key_plan import KEY_PROOF_SETS, KEYS
from kvguard.fault_injection.phases_plan import PHASE_PROOF_SETS
from kvguard.fault_injection.plan import (
    ENGINES,
    KV_DTYPES,
    LEVEL,
    PHASES,
    PROOF_SETS,
    RUNNERS,
    SCENARIO_LEVEL,
    SCHEDULINGS,
    WEIGHTS,
    CampaignPlan,
    Cell,
    CleanPlan,
    TrialPlan,
)
from kvguard.fault_injection.sglang_plan import LOOPS, SGLANG_FAULTS, SGLANG_WRITE_FAULTS
from kvguard.fault_injection.targets.sglang_keys import SGLANG_KEY_FAULTS, SGLANG_KEY_PROOF_SETS
from kvguard.fault_injection.targets.vllm_keys import VLLM_KEY_FAULTS
from kvguard.fault_injection.targets.vllm_writes import VLLM_WRITE_FAULTS

LATEST = "latest"
PLAN, HISTORY, RESULTS, REPORT, JUNIT = "plan.toml", "history.jsonl", "results.json", "report.html", "junit.xml"
FAILURE = "failure.txt"
ENGINE_LOG = "engine.log"
"""What vLLM or SGLang printed; only their campaigns have it."""


class RunFolderError(RuntimeError):
    """The run folder cannot be written or read; the message is one line and says what to do."""


class RunFolder:
    """The folder of one campaign while it runs."""

    def __init__(self, parent: Path, seed: int) -> None:
        """Create `parent`/<time>-<seed>.partial. Raises RunFolderError."""
        self._parent = parent
        self._name = ""
        self.path = parent
        self._history: IO[str] | None = None
        link = parent / LATEST
        if link.exists() and not link.is_symlink():
            raise RunFolderError(f"{link} is no link to a run: move it away, or choose another folder with --runs-dir")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._claim(f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}")
            self._history = (self.path / HISTORY).open("w", encoding="utf-8")
        except OSError as error:
            raise self._cannot_write(error) from None

    def _claim(self, wanted: str) -> None:
        """Take the first free name; making the folder is the test, so that two campaigns cannot take the same."""
        for number in itertools.count(1):
            self._name = wanted if number == 1 else f"{wanted}-{number}"
            self.path = self._parent / f"{self._name}.partial"
            if (self._parent / self._name).exists():
                continue
            try:
                self.path.mkdir()
                return
            except FileExistsError:
                continue

    @property
    def name(self) -> str:
        """What the folder is called once it is complete."""
        return self._name

    def _cannot_write(self, error: OSError) -> RunFolderError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free some space, or choose another folder with --runs-dir"
        if not full:
            advice = "choose another folder with --runs-dir"
        return RunFolderError(
            f"cannot write {self.path}: {error.strerror or error}; {advice}; earlier runs are as they were"
        )

    def append(self, record: dict[str, Any]) -> None:
        """One line of history, on disk before the call returns. Raises RunFolderError."""
        assert self._history is not None
        try:
            self._history.write(json.dumps(record) + "\n")
            self._history.flush()
        except OSError as error:
            raise self._cannot_write(error) from None

    def write(self, name: str, text: str) -> None:
        """Write one file. Raises RunFolderError."""
        try:
            (self.path / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise self._cannot_write(error) from None

    def complete(self) -> Path:
        """Give the folder its final name and point `latest` to it. Raises RunFolderError.

        A file system without links costs `latest`, not the run: the folder is complete all the same.
        """
        self.close()
        final = self._parent / self._name
        link, new_link = self._parent / LATEST, self._parent / f".{LATEST}-{os.getpid()}"
        try:
            self.path.rename(final)
            self.path = final
        except OSError as error:
            raise self._cannot_write(error) from None
        try:
            new_link.unlink(missing_ok=True)
            new_link.symlink_to(self._name)
            new_link.replace(link)
        except OSError as error:
            with contextlib.suppress(OSError):
                new_link.unlink(missing_ok=True)
            print(f"kvguard campaign: cannot point {link} to the run: {error.strerror or error}", file=sys.stderr)
        return final

    def close(self) -> None:
        """Stop writing history; a folder that was not completed keeps its partial name."""
        if self._history is not None:
            try:
                self._history.close()
            except OSError:
                # The flush of a buffered line on a full disk; the failure itself was reported by `append`.
                pass
            self._history = None


def plan_toml(plan: CampaignPlan) -> str:
    """The plan as TOML: enough to run any trial again."""
    lines = [
        f"seed = {plan.seed}",
        f"engine = {json.dumps(plan.engine)}",
        f"model = {json.dumps(plan.model)}",
        f"backend = {json.dumps(plan.backend)}",
        *([f"left_out = {json.dumps(list(plan.left_out))}"] if plan.left_out else []),
    ]
    for trial in plan.trials:
        cell = trial.cell
        lines += [
            "",
            "[[trial]]",
            f"index = {trial.index}",
            f"engine = {json.dumps(cell.engine)}",
            f"fault = {json.dumps(cell.fault)}",
            f"kv_dtype = {json.dumps(cell.kv_dtype)}",
            f"weights = {json.dumps(cell.weights)}",
            f"page_size = {cell.page_size}",
            f"proofs = {json.dumps(cell.proofs)}",
            f"level = {json.dumps(cell.level)}",
            f"traffic_seed = {trial.traffic_seed}",
            f"fault_seed = {trial.fault_seed}",
            *([f"phases = {json.dumps(cell.phases)}"] if cell.phases != "single" else []),
            *_setup_lines(cell),
        ]
    for run in plan.clean_runs:
        lines += [
            "",
            "[[clean_run]]",
            f"index = {run.index}",
            f"kv_dtype = {json.dumps(run.kv_dtype)}",
            f"weights = {json.dumps(run.weights)}",
            f"page_size = {run.page_size}",
            f"traffic_seed = {run.traffic_seed}",
            *([f"engine = {json.dumps(run.engine)}"] if run.engine != "embedded" else []),
            *([f"phases = {json.dumps(run.phases)}"] if run.phases != "single" else []),
            *([f"traffic = {json.dumps(run.traffic)}"] if run.traffic else []),
            *([f"scenario = {json.dumps(run.scenario)}"] if run.scenario else []),
            *_setup_lines(run),
        ]
    return "\n".join(lines) + "\n"


def _setup_lines(item: Cell | CleanPlan) -> list[str]:
    """What only cells of vLLM and SGLang have."""
    names = ("runner", "scheduling")
    return [f"{name} = {json.dumps(getattr(item, name))}" for name in names if getattr(item, name)]


def read_plan(folder: Path) -> CampaignPlan:
    """The plan of an earlier run. Raises RunFolderError if there is none or it cannot be understood."""
    import tomllib

    path = folder / PLAN
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        trials = tuple(
            TrialPlan(
                index=item["index"],
                traffic_seed=item["traffic_seed"],
                fault_seed=item["fault_seed"],
                cell=_cell(item),
            )
            for item in data.get("trial", ())
        )
        clean = tuple(CleanPlan(**item) for item in data.get("clean_run", ()))
        plan = CampaignPlan(
            seed=data["seed"],
            engine=data["engine"],
            model=data["model"],
            backend=data["backend"],
            trials=trials,
            clean_runs=clean,
            left_out=tuple(data.get("left_out", ())),
        )
        _check_plan(plan)
        return plan
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}; run a campaign first") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is not a plan of this release: {error}") from None


def _cell(item: dict[str, Any]) -> Cell:
    """The cell of a plan's trial; KeyError for what is missing and has no other engine's default."""
    optional = ("runner", "scheduling", "phases")
    return Cell(**{key: item[key] for key in Cell.__dataclass_fields__ if key in item or key not in optional})


def _check_plan(plan: CampaignPlan) -> None:
    """ValueError for values that this release does not have."""
    from kvguard.kernels.backend import check_backend

    check_backend(plan.backend)
    if not isinstance(plan.model, str):
        raise ValueError(f"model {plan.model!r} is no name")
    for trial in plan.trials:
        cell = trial.cell
        if cell.level == SCENARIO_LEVEL:
            _check_scenario(trial)
            continue
        on_vllm, is_pd = cell.engine == "vllm", cell.phases == "pd"
        in_sglang = cell.engine == "sglang"
        misled: dict[str, Container[str]] = {
            "embedded": () if is_pd else WRITE_FAULTS,
            "vllm": VLLM_WRITE_FAULTS,
            "sglang": SGLANG_WRITE_FAULTS,
        }
        writes = misled.get(cell.engine, ())
        key_faults: dict[str, Container[str]] = {
            "embedded": () if is_pd else KEY_FAULTS,
            "vllm": VLLM_KEY_FAULTS,
            "sglang": SGLANG_KEY_FAULTS,
        }
        keyed = cell.fault in key_faults.get(cell.engine, ())
        faults = SGLANG_FAULTS if in_sglang else (*PAGE_FAULTS, *(TRANSFER_FAULTS if is_pd else ()))
        proof_sets: Sequence[str] = PHASE_PROOF_SETS if is_pd else PROOF_SETS
        if cell.fault in writes:
            proof_sets = WRITE_PROOF_SETS
        if keyed:
            proof_sets = SGLANG_KEY_PROOF_SETS[cell.fault] if in_sglang else KEY_PROOF_SETS
        schedulings = SCHEDULINGS if on_vllm else LOOPS if in_sglang else ("",)
        for what, value, valid in (
            ("engine", cell.engine, ENGINES),
            ("runner", cell.runner, RUNNERS if on_vllm else ("",)),
            ("scheduling", cell.scheduling, schedulings),
            ("phases", cell.phases, PHASES[:1] if on_vllm or in_sglang else PHASES),
            ("fault", cell.fault, KEY_FAULTS if keyed else writes if cell.fault in writes else faults),
            ("level", cell.level, (KEYS,) if keyed else (LEVEL,)),
            ("kv_dtype", cell.kv_dtype, KV_DTYPES),
            ("weights", cell.weights, WEIGHTS),
            ("proofs", cell.proofs, proof_sets),
            ("page_size", cell.page_size, range(32, 129, 32) if on_vllm else range(1, 65)),
        ):
            if value not in valid:
                raise ValueError(f"trial {trial.index} has {what} {value!r}")


def _check_scenario(trial: TrialPlan) -> None:
    """ValueError for a scenario, or a set of proofs of it, that this release does not have."""
    from kvguard.fault_injection.scenarios.registry import SCENARIOS

    cell = trial.cell
    scenario = SCENARIOS.get(cell.fault)
    if scenario is None or scenario.engine != cell.engine:
        raise ValueError(f"trial {trial.index} has scenario {cell.fault!r} in {cell.engine!r}")
    if cell.proofs not in scenario.proof_sets:
        raise ValueError(f"trial {trial.index} has proofs {cell.proofs!r}")
