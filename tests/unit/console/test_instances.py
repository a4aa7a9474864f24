"""The list of services: names, order and refused entries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.console.instances import ROLES, listed_places, local_places
from freshet.errors import ConfigError
from freshet.http.addresses import Address

HOSTS = st.from_regex(
    r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z]{1,5})?", fullmatch=True
) | st.ip_addresses().map(str)
ADDRESSES = st.builds(Address, HOSTS, st.integers(1, 65_535))
LISTS = st.lists(st.tuples(st.sampled_from(ROLES), ADDRESSES), min_size=1, max_size=20, unique=True)


@given(LISTS, st.sampled_from([",", ", ", " ,\n"]))
def test_every_listed_service_has_a_unique_name(services: list[tuple[str, Address]], between: str) -> None:
    places = listed_places(between.join(f"{role}={address}" for role, address in services))

    assert sorted((i.role, str(i.address)) for i in places.instances) == sorted(
        (role, str(address)) for role, address in services
    )
    names = [i.name for i in places.instances]
    assert len(set(names)) == len(names)
    assert all(i.name == i.role or i.name.startswith(f"{i.role}-") for i in places.instances)
    assert [ROLES.index(i.role) for i in places.instances] == sorted(
        ROLES.index(role) for role, _ in services
    ), "in the order of an event's way"


def test_one_of_a_role_has_its_name_and_several_are_numbered() -> None:
    found = listed_places(
        "gateway=gateway-1.news:7000,gateway=gateway-0.news:7000,trainer=10.0.0.1:7011,"
        "inference=[fd00::1]:7001,inference=[fd00::2]:7001,joiner=joiner-0:7010,joiner=other:7010"
    )

    assert {str(i.address): i.name for i in found.instances} == {
        "gateway-1.news:7000": "gateway-1",  # by its host's name, not by its place in the list
        "gateway-0.news:7000": "gateway-0",
        "joiner-0:7010": "joiner-0",
        "other:7010": "joiner-1",
        "10.0.0.1:7011": "trainer",
        "[fd00::1]:7001": "inference-0",
        "[fd00::2]:7001": "inference-1",
    }
    assert not found.supervised


def test_hosts_that_bear_one_name_in_two_domains_are_numbered() -> None:
    found = listed_places("gateway=gateway-0.east:7000,gateway=gateway-0.west:7000")

    assert [i.name for i in found.instances] == ["gateway-0", "gateway-1"]


@pytest.mark.parametrize(
    ("text", "named", "expected"),
    [
        ("gateway", "gateway", "role=host:port"),
        ("gateways=g:7000", "gateways=g:7000", "one of gateway, joiner"),
        ("console=c:7002", "console=c:7002", "one of gateway, joiner"),
        ("gateway=g:7000,", "''", "role=host:port"),
        ("joiner=j:7010,gateway=g", "gateway=g", "host:port"),
        ("gateway=::1:7000", "gateway=::1:7000", "brackets"),
        ("gateway=g:7000, gateway=g:7000", "gateway=g:7000", "each service once"),
        (",".join(f"gateway=g:{port}" for port in range(1, 503)), "502 services", "at most 500"),
    ],
)
def test_a_malformed_list_stops_the_start_with_the_entry(text: str, named: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listed_places(text)

    said = str(caught.value)
    assert "FRESHET_CONSOLE_SERVICES" in said
    assert named in said
    assert expected in said


def test_services_of_one_machine_are_one_of_each() -> None:
    places = local_places({"gateway": 7000, "joiner": 7010}, {"simulator": 7012})

    assert [(i.name, str(i.address)) for i in places.instances] == [
        ("gateway", "127.0.0.1:7000"),
        ("joiner", "127.0.0.1:7010"),
    ]
    assert [i.name for i in places.optional] == ["simulator"]
    assert places.supervised
