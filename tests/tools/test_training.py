"""The training loop keeps its time and its schedule."""

from __future__ import annotations

import time

import torch
from torch import nn

from tools.train_demo.training import REPORTS, Average, Plan, Trainer, train


def fitting(plan: Plan):
    """A line through points of another line, with a pause in each step."""
    torch.manual_seed(0)
    layer = nn.Linear(1, 1)

    def loss():
        time.sleep(0.002)
        x = torch.randn(64, 1)
        return (layer(x) - (2 * x - 1)).square().mean()

    return layer, Trainer(loss, list(layer.parameters()), plan)


def test_it_ends_when_its_time_is_over() -> None:
    layer, trainer = fitting(plan := Plan(1.5, None, peak_lr=0.05, warmup=20, weight_decay=0.0))
    begun = time.monotonic()
    history = train("line", trainer, plan, begun - 0.5)  # half a second went before
    assert 0.7 < time.monotonic() - begun < 2.0
    assert history.steps > 60 and REPORTS <= len(history.losses) <= REPORTS + 1
    assert history.losses[-1][0] == history.steps
    assert abs(layer.weight.item() - 2) < 0.1 and abs(layer.bias.item() + 1) < 0.1


def test_a_number_of_steps_gives_the_same_weights_again() -> None:
    found = []
    for _ in range(2):
        layer, trainer = fitting(plan := Plan(0.0, 30, peak_lr=0.05, warmup=5, weight_decay=0.0))
        assert train("line", trainer, plan, time.monotonic()).steps == 30
        found.append((layer.weight.item(), layer.bias.item()))
    assert found[0] == found[1]


def test_the_rate_rises_and_falls_to_nothing() -> None:
    plan = Plan(0.0, 100, peak_lr=1.0, warmup=10, weight_decay=0.0)
    rates = [plan.lr(step, 100) for step in range(100)]
    assert max(rates) == max(rates[8:12]) and rates[0] < 0.11 and rates[-1] < 1e-3


def test_the_average_follows_the_weights() -> None:
    weight = nn.Parameter(torch.zeros(3))
    average = Average([weight])
    for step in range(1, 4001):
        with torch.no_grad():
            weight.fill_(1.0 if step % 2 else 3.0)
        average.update(step)
    average.apply()
    assert (weight - 2).abs().max() < 0.05
