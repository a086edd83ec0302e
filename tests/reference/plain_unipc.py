"""UniPC of order 2 with B(h) = exp(h) - 1 for flow models, in float64 and by its formulas.

x at noise s is (1 - s) data + s noise; m is the prediction of the data; l is log((1 - s) / s).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


def solve(x: np.ndarray, sigmas: list[float], velocity: Callable[[np.ndarray, int], np.ndarray]):
    """All latents after each step: prediction, then at the next step its correction first."""
    lam = [math.log((1 - s) / s) for s in sigmas[:-1]]
    data: list[np.ndarray] = []
    corrected, order, states = x, 0, []
    for i in range(len(sigmas) - 1):
        m = x - sigmas[i] * velocity(x, i)
        if i > 0:
            x = correct(corrected, [*data, m], sigmas, lam, i, order)
        corrected = x
        data.append(m)
        order = min(2, i + 1, len(sigmas) - 1 - i)
        x = predict(x, data, sigmas, lam, i, order)
        states.append(x)
    return states


def predict(x, data, sigmas, lam, i, order):
    if sigmas[i + 1] == 0:
        return data[-1]
    h = lam[i + 1] - lam[i]
    grow = (1 - sigmas[i + 1]) * (1 - math.exp(-h))
    slope = 0
    if order == 2:
        slope = 0.5 * (data[-2] - data[-1]) / ((lam[i - 1] - lam[i]) / h)
    return sigmas[i + 1] / sigmas[i] * x + grow * (data[-1] + slope)


def correct(x, data, sigmas, lam, i, order):
    """Redo the step from i - 1 to i, now that the data prediction at i is known."""
    h = lam[i] - lam[i - 1]
    grow = (1 - sigmas[i]) * (1 - math.exp(-h))
    new, m = data[-1], data[-2]
    if order == 1:
        slopes = 0.5 * (new - m)
    else:
        ratio = (lam[i - 2] - lam[i - 1]) / h
        b = math.expm1(-h)
        phi_2 = (b / -h - 1) / -h
        phi_3 = (phi_2 - 0.5) / -h
        weights = np.linalg.solve([[1, 1], [ratio, 1]], [-h * phi_2 / b, -h * phi_3 * 2 / b])
        slopes = weights[0] * (data[-3] - m) / ratio + weights[1] * (new - m)
    return sigmas[i] / sigmas[i - 1] * x + grow * (m + slopes)
