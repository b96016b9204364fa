"""The pytest plugin: a fault campaign against a team's own engine, as tests of their own suite. See docs/ci.md.

pytest imports this module in every project that merely has kvguard installed: nothing else of kvguard may be imported
before a campaign is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvguard.fault_injection.pytest_campaign import CampaignTest

DEFAULT_SEED = 1
MARKER = (
    "kvguard(trials=N, clean_runs=N, faults=(...), proofs=(...)): a test that runs a kvguard fault campaign with the "
    "fixture kvguard_campaign; without --kvguard-campaign it is skipped"
)
SKIPPED = "a fault campaign: give --kvguard-campaign to run it"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options of a campaign."""
    group = parser.getgroup("kvguard", "fault campaigns against your own engine")
    group.addoption(
        "--kvguard-campaign", action="store_true", help="run the tests that use the fixture kvguard_campaign"
    )
    group.addoption(
        "--kvguard-seed", type=int, default=DEFAULT_SEED, metavar="N",
        help="seed of the campaign's traffic and faults (default: %(default)s)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """The marker is always known; the report of a campaign is there when one runs."""
    config.addinivalue_line("markers", MARKER)
    if config.getoption("--kvguard-campaign"):
        from kvguard.fault_injection.pytest_report import CampaignReport

        config.pluginmanager.register(CampaignReport(config), "kvguard-campaign-report")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A campaign's test becomes one item per trial and clean run, with the same names in every process."""
    if "kvguard_campaign" not in metafunc.fixturenames:
        return
    if not metafunc.config.getoption("--kvguard-campaign"):
        metafunc.parametrize("kvguard_campaign", [None], ids=["campaign"], indirect=True)
        return
    from kvguard.fault_injection.pytest_campaign import MarkerError, plan_jobs

    marker = metafunc.definition.get_closest_marker("kvguard")
    try:
        jobs = plan_jobs(marker, metafunc.config.getoption("--kvguard-seed"))
    except MarkerError as error:
        pytest.fail(f"@pytest.mark.kvguard on {metafunc.definition.nodeid}: {error}", pytrace=False)
    metafunc.parametrize("kvguard_campaign", jobs, ids=[job.name for job in jobs], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --kvguard-campaign a campaign's tests are skipped before any of their fixtures is made."""
    if config.getoption("--kvguard-campaign"):
        return
    for item in items:
        if item.get_closest_marker("kvguard") or "kvguard_campaign" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=SKIPPED))


@pytest.fixture
def kvguard_campaign(request: pytest.FixtureRequest) -> Iterator[CampaignTest]:
    """One trial or clean run of a campaign: call its `run(factory)`, once. See docs/ci.md for what a factory makes."""
    from kvguard.fault_injection.pytest_campaign import CampaignTest

    def record(name: str, value: Any) -> None:
        # What record_property does, without its warning about a schema of JUnit files that has no such thing.
        request.node.user_properties.append((name, value))

    test = CampaignTest(request.param, nodeid=request.node.nodeid, record=record)
    yield test
    if not test.was_run and not getattr(request.node, "kvguard_left_early", False):
        pytest.fail("kvguard_campaign.run(factory) was not called: this test proves nothing", pytrace=False)
