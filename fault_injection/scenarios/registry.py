"""Every scenario by name, in the order of the table in docs/scenarios.md."""

from __future__ import annotations

from kvguard.fault_injection.scenarios.keys import KEY_SCENARIOS
from kvguard.fault_injection.scenarios.pages import PAGE_SCENARIOS
from kvguard.fault_injection.scenarios.phantoms import PHANTOM_SCENARIOS
from kvguard.fault_injection.scenarios.releases import RELEASE_SCENARIOS
from kvguard.fault_injection.scenarios.rows import ROW_SCENARIOS
from kvguard.fault_injection.scenarios.scenario import Scenario
from kvguard.fault_injection.scenarios.stores import STORE_SCENARIOS
from kvguard.fault_injection.scenarios.writes import WRITE_SCENARIOS

__all__ = ["SCENARIOS", "scenarios_of"]

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        *RELEASE_SCENARIOS,
        *PAGE_SCENARIOS,
        *PHANTOM_SCENARIOS,
        *ROW_SCENARIOS,
        *WRITE_SCENARIOS,
        *KEY_SCENARIOS,
        *STORE_SCENARIOS,
    )
}


def scenarios_of(engine: str) -> tuple[Scenario, ...]:
    """Those that are replayed in this engine: embedded, vllm or sglang."""
    return tuple(scenario for scenario in SCENARIOS.values() if scenario.engine == engine)
