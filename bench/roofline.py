"""The dense roofline: the plain network alone on this machine, without rows, log or measures.

Forward, backward and Adam of an MLP 432-512-256-1 in torch (429 inputs padded to 16), on input in memory.
Four variants: `nn.Linear` or a linear by oneDNN (torch's own fp32 may take a slower path), by one lane of as
many threads as there are cores or by lanes of one thread that sum gradients and step once. The roofline is
the fastest. Each runs in a process of its own, or, to save torch's loading, all one after the other; our
figures are taken without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HIDDEN = 432, (512, 256)
WARM_UP = 3
"""Steps before the clock starts."""
_LINEAR = torch.ops.mkldnn._linear_pointwise  # the primitive that torch's own compiler calls on CPU


class _OneDnn(torch.autograd.Function):
    """y = x Wᵀ + b and its gradients by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Save the tensors of the backward pass."""
        weight, bias = weight.to(x.dtype), bias.to(x.dtype)  # fp32 where the input is bf16
        ctx.save_for_backward(x, weight)
        y: Tensor = _LINEAR(x, weight, bias, "none", [], "")
        return y

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        """Return dx, dW, db."""
        x, weight = ctx.saved_tensors
        dy = outputs[0].contiguous()
        dx = _LINEAR(dy, weight.t(), None, "none", [], "") if ctx.needs_input_grad[0] else None
        dw = _LINEAR(dy.t(), x.t(), None, "none", [], "")
        return dx, dw.float(), dy.sum(0).float()


class OneDnnLinear(nn.Linear):
    """`nn.Linear` by oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, out)."""
        y: Tensor = _OneDnn.apply(x, self.weight, self.bias)
        return y


def network(linear: type[nn.Linear]) -> nn.Sequential:
    """Return the plain model's dense part."""
    torch.manual_seed(0)
    first, second = HIDDEN
    return nn.Sequential(
        linear(WIDTH, first), nn.ReLU(), linear(first, second), nn.ReLU(), nn.Linear(second, 1)
    )


class Lane:
    """A network, its input and its labels."""

    def __init__(self, net: nn.Sequential, rows: int, precision: str) -> None:
        self.net, self.bf16 = net, precision == "bf16"
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        self.x = torch.rand(rows, WIDTH).to(dtype).requires_grad_()
        self.y = torch.randint(0, 2, (rows, 1)).float()

    def forward_backward(self) -> None:
        """Compute the loss and its gradients, those of the input too, which rows would get."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.net(self.x)
        nn.functional.binary_cross_entropy_with_logits(logits.float(), self.y).backward()
        self.x.grad = None


def one_lane(linear: type[nn.Linear], rows: int, precision: str, seconds: float) -> float:
    """Return samples/s of one lane with as many threads as there are cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    lane = Lane(network(linear), rows, precision)
    adam = torch.optim.Adam(lane.net.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        lane.forward_backward()
        adam.step()
        adam.zero_grad()

    return rows * _rate(step, seconds)


def lanes(linear: type[nn.Linear], rows: int, precision: str, seconds: float, count: int) -> float:
    """Return samples/s of `count` lanes of one thread and `rows` rows each, which step together."""
    nets = [network(linear) for _ in range(count)]
    for net in nets[1:]:
        for own, shared in zip(net.parameters(), nets[0].parameters(), strict=True):
            own.data = shared.data
    parameters = [list(net.parameters()) for net in nets]
    adam = torch.optim.Adam(parameters[0], lr=1e-3, fused=True)
    steps, begin, stop = -WARM_UP, 0.0, False

    def step() -> None:
        nonlocal steps, begin, stop
        grads = [[p.grad for p in own if p.grad is not None] for own in parameters]
        for first, *others in zip(*grads, strict=True):
            for other in others:
                first.add_(other)
            first.mul_(1 / count)
        adam.step()
        for own in parameters:
            for parameter in own:
                parameter.grad = None
        steps += 1
        if steps == 0:
            begin = time.perf_counter()
        stop = steps > 0 and time.perf_counter() > begin + seconds

    barrier = threading.Barrier(count, action=step)

    def run(lane: Lane) -> None:
        torch.set_num_threads(1)
        while not stop:
            lane.forward_backward()
            barrier.wait()

    threads = [threading.Thread(target=run, args=(Lane(net, rows, precision),)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return steps * count * rows / (time.perf_counter() - begin)


def _rate(step: Callable[[], None], seconds: float) -> float:
    for _ in range(WARM_UP):
        step()
    steps, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) < begin + seconds:
        step()
        steps += 1
    return steps / (now - begin)


VARIANTS: dict[str, tuple[type[nn.Linear], bool]] = {
    "torch_one_lane": (nn.Linear, False),
    "torch_lanes": (nn.Linear, True),
    "onednn_one_lane": (OneDnnLinear, False),
    "onednn_lanes": (OneDnnLinear, True),
}


def measure(variant: str, precision: str, rows: int, seconds: float) -> float:
    """Return samples/s of a variant: lanes of `rows` rows, or one lane of as many rows as they all have."""
    linear, several = VARIANTS[variant]
    cores = os.cpu_count() or 1
    if several:
        return lanes(linear, rows, precision, seconds, cores)
    return one_lane(linear, rows * cores, precision, seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--variant", choices=list(VARIANTS), nargs="+", required=True, help="measured in this order"
    )
    parser.add_argument("--precision", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--rows", type=int, default=2048, help="of a lane")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = vars(parser.parse_args())
    chosen = options.pop("variant")
    print(json.dumps({name: measure(name, **options) for name in chosen}))
