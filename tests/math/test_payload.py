"""Lanes: flags survive the sum of any number of ranks, in few lanes."""

import pytest
import torch

from shardclip.payload import Flags, Lanes

SAID = [Flags(1, 0, 0, 0), Flags(1, 1, 0, 1), Flags(0, 1, 1, 0), Flags(1, 1, 1, 1)]


@pytest.mark.parametrize("ranks", [4, 9000, 16_384, 200_000])
def test_flags_add_up(ranks):
    lanes = Lanes(slots=0, ranks=ranks)
    told = torch.tensor([lanes.say(flags) for flags in SAID], dtype=torch.float64)
    rest = torch.tensor(lanes.say(SAID[-1]), dtype=torch.float64) * (ranks - 4)
    reduced = told.sum(0) + rest
    assert lanes.heard(reduced.tolist()) == Flags(ranks - 1, ranks - 1, ranks - 2, ranks - 2)


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
    assert lanes.heard(told.amax(0).tolist()) == Flags(1, 1, 1, 1)


def test_a_usual_step_sends_two_numbers():
    """Each number more would be a message more on each hop of Gloo's ring."""
    assert Lanes(slots=0, ranks=4).size == 2
