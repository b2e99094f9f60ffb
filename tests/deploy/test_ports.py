"""Ports that nothing else takes before they are opened."""

import socket

import pytest

from minillm.deploy import ports
from minillm.deploy.ports import ABOVE, free_ports


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Lets the system say from which port on it gives them away."""
    file = tmp_path / "range"
    monkeypatch.setattr(ports, "GIVEN", file)
    return lambda first: file.write_text(f"{first}\t60999\n")


def test_free_ports_are_none_that_the_system_gives_to_connections(given):
    given(ABOVE + 500)
    found = free_ports(4)
    assert len(set(found)) == 4 and all(ABOVE <= port < ABOVE + 500 for port in found)


def test_a_port_that_is_taken_is_passed_over(given, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(ports, "ABOVE", taken)
        given(taken + 1)
        assert free_ports(1) != [taken]


@pytest.mark.parametrize("first", [None, ABOVE, 1024])
def test_where_the_system_gives_all_ports_or_does_not_say_it_chooses(given, first):
    if first is not None:
        given(first)
    assert len(set(free_ports(3))) == 3
