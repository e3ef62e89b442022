"""Timetables of clients with unequal work: every step once and in its order, few places in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fednorm.engines.stack.timetable import timetable

FULL = 4
SIZES = st.lists(st.lists(st.integers(1, FULL), min_size=1, max_size=12), min_size=1, max_size=20)


@given(SIZES)
def test_every_client_takes_all_its_steps_in_their_order(sizes: list[list[int]]) -> None:
    taken: dict[int, list[int]] = {client: [] for client in range(len(sizes))}
    for launch in timetable(sizes, FULL):
        together = [client for _, client in launch.steps]
        assert len({*together, *launch.fill}) == launch.width
        for step, client in launch.steps:
            assert sizes[client][step] == launch.size
            taken[client].append(step)
    assert taken == {client: list(range(len(own))) for client, own in enumerate(sizes)}


@given(SIZES)
def test_the_places_fit_into_twice_a_table(sizes: list[list[int]]) -> None:
    places = sum(launch.width for launch in timetable(sizes, FULL))
    assert places <= 2 * len(sizes) * max(map(len, sizes))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
def test_full_batches_take_little_longer_than_the_longest_client(counts: list[int]) -> None:
    """At a width that wastes at most half of what is computed: one stack of all would waste far more."""
    launches = timetable([[FULL] * count for count in counts], FULL)
    assert len(launches) == max(counts)
    assert {launch.width for launch in launches} == {launches[0].width}
    assert (launches[0].width - 2) * max(counts) <= 1.5 * sum(counts)


def test_equal_clients_step_together_on_smaller_batches_too() -> None:
    launches = timetable([[4, 4, 2]] * 7, FULL)
    assert [(launch.size, launch.width) for launch in launches] == [(4, 7), (4, 7), (2, 7)]
