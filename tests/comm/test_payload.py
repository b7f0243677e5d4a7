"""Lanes: flags survive the sum of any number of ranks, in few lanes."""

import pytest
import torch

from shardclip.comm.payload import Flags, Lanes
from shardclip.comm.world import World
from shardclip.math import fingerprints

SAID = [Flags(1, 0, 0, 0), Flags(1, 1, 0, 1), Flags(0, 1, 1, 0), Flags(1, 1, 1, 1)]


def heard(lanes, flags):
    payload = lanes.pack(torch.device("cpu"), None, Flags())
    payload[lanes.flags] = flags
    return lanes.heard(payload)


@pytest.mark.parametrize("ranks", [4, 9000, 16_384, 200_000])
def test_flags_add_up(ranks):
    lanes = Lanes(slots=0, ranks=ranks)
    told = torch.tensor([lanes.say(flags) for flags in SAID], dtype=torch.float64)
    rest = torch.tensor(lanes.say(SAID[-1]), dtype=torch.float64) * (ranks - 4)
    reduced = told.sum(0) + rest
    assert heard(lanes, reduced) == Flags(ranks - 1, ranks - 1, ranks - 2, ranks - 2)


@pytest.mark.parametrize("ranks", [0, 4, 16_384, 200_000])
@pytest.mark.parametrize("wrong", [False, True])
def test_an_error_is_seen_on_the_device(ranks, wrong):
    lanes = Lanes(slots=0, ranks=ranks)
    payload = lanes.pack(torch.device("cpu"), None, Flags())
    said = [Flags(1, 1, 1, 0)] * (max(ranks, 1) - 1) + [Flags(1, 1, 1, int(wrong))]
    for flags in set(said):
        payload[lanes.flags] += torch.tensor(lanes.say(flags)).double() * said.count(flags)
    assert bool(lanes.failed(payload)) is wrong


def test_under_a_maximum_flags_have_lanes_of_their_own():
    lanes = Lanes(slots=0)
    told = torch.tensor([lanes.say(flags) for flags in SAID[:3]], dtype=torch.float64)
    assert heard(lanes, told.amax(0)) == Flags(1, 1, 1, 1)


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_usual_step_sends_two_numbers(ranks):
    """Each number more would be a message more on each hop of Gloo's ring."""
    assert Lanes(slots=0, ranks=ranks, checks=True).size == 2


@pytest.mark.parametrize("maximum", [False, True])
@pytest.mark.parametrize("values", [(5, 5, 5), (5, 5, 6), (6, 5, 5), (5, 6, 5), (0, 0, 1)])
def test_settings_that_differ_are_seen(values, maximum):
    lanes = Lanes(slots=0, ranks=0 if maximum else 3, checks=True)
    told = []
    for rank, value in enumerate(values):
        flags = Flags(1, 1, 0, 0, **lanes.settings(value, World((0, 1, 2), rank), maximum))
        told.append(torch.tensor(lanes.say(flags), dtype=torch.float64))
    reduced = torch.stack(told).amax(0) if maximum else torch.stack(told).sum(0)
    found = heard(lanes, reduced)
    assert found.differ is (len(set(values)) > 1)
    assert found.present == (1 if maximum else 3)
    payload = lanes.pack(torch.device("cpu"), None, Flags())
    payload[lanes.flags] = reduced
    assert bool(lanes.failed(payload)) is found.differ


@pytest.mark.parametrize("combined", [torch.sum, torch.amax])
@pytest.mark.parametrize("maximum", [(True, False), (False, True), (False, True, True)])
def test_ranks_that_sum_and_ranks_that_take_the_maximum_see_it(maximum, combined):
    """A backend may do either with a lane; each rank's setting is another, as its p is."""
    world = tuple(range(len(maximum)))
    lanes = Lanes(slots=0, checks=True)
    told = []
    for rank, how in enumerate(maximum):
        flags = Flags(**lanes.settings(fingerprints.of(how), World(world, rank), how))
        told.append(torch.tensor(lanes.say(flags), dtype=torch.float64))
    assert heard(lanes, combined(torch.stack(told), 0)).differ


def test_any_two_sets_of_ranks_are_told_apart():
    for count in range(2, 40):
        given = fingerprints.coefficients(count, fingerprints.SETTINGS)
        assert sum(given) % fingerprints.SETTINGS == 0
        for cut in range(1, count):
            assert sum(given[:cut]) % fingerprints.SETTINGS
