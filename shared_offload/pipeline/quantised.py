"""An FP8 stand-in for `nn.Linear` inside modules that a library built.

Invariant: real weight = codes * scale, kept as on disk; nothing is ever dequantised.
"""

from __future__ import annotations

from torch import Tensor, nn

from shared_offload.weights.fp8 import linear_fp8


class Fp8Linear(nn.Module):
    """y = linear_fp8(x): codes (N, K) FP8, scale (N, 1) fp32, bias (N) or None.

    The tensors are buffers outside the state dict, so that a strict load of the module around this
    one does not ask for them. There is no tensor called `weight` on purpose: UMT5's feed-forward
    casts its input to the dtype of `wo.weight` if that is a tensor, which would be FP8 here.
    """

    weight = None

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.codes: Tensor
        self.scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear_fp8(x, self.codes, self.scale, self.bias)
