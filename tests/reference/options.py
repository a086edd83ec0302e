"""Keys of the JSON that say where the DiT's weights come from and live, as tests combine them."""

from __future__ import annotations

FP8 = {"dit_quantized": True, "dit_quant_scheme": "fp8-vllm"}
WEIGHTS = {"bf16": {}, "fp32": {"dtype": "FP32"}, "fp8": FP8}
OFFLOAD = {"cpu_offload": True}
SHARED = {**OFFLOAD, "shared_cpu_weights": True, "shared_cpu_weight_scope": "host"}
PHASES = {"offload_granularity": "phase"}
