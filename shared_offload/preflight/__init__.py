"""WHO CHECKS what the host has: files, ranks, GPUs and their memory, before anything is loaded."""

from __future__ import annotations

from shared_offload.preflight.checks import Preflight, agree
from shared_offload.preflight.plan import ACTIVATIONS, gpu_plan

__all__ = ["ACTIVATIONS", "Preflight", "agree", "gpu_plan"]
