"""SwiGLU as an operator for every transform: `y = silu(a) * b` with `a = x @ gate`, `b = x @ up`.

    python docs/examples/swiglu.py        # about 15 seconds

Without a GPU that is plain torch; with `TRITON_INTERPRET=1` and `PRIMITIVES_BACKEND=triton` in the environment it is
the kernel in Triton's interpreter.
"""

import optree
import torch
import triton
import triton.language as tl

import primitives as pr
from primitives.testing import check_rules


@optree.dataclasses.dataclass(namespace="swiglu")
class Weights:
    """Projections, `[dim, hidden]`: a node of optree's trees, and of torch's for its compiler."""

    gate: torch.Tensor
    up: torch.Tensor


torch.export.register_dataclass(Weights)


@triton.jit
def gated_kernel(numel, a_ptr, b_ptr, c_ptr, d_ptr, y_ptr, z_ptr, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """One block of elements of what `gated` returns: y, or y and z; `others` is c, or c and d."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    DTYPE: tl.constexpr = tl.float64 if a_ptr.dtype.element_ty == tl.float64 else tl.float32
    a, b = tl.load(a_ptr + offsets, mask).to(DTYPE), tl.load(b_ptr + offsets, mask).to(DTYPE)
    sigmoid = 1 / (1 + tl.exp(-a))
    silu, silu_prime = a * sigmoid, sigmoid * (1 + a * (1 - sigmoid))
    if MODE == "value":
        tl.store(y_ptr + offsets, silu * b, mask)
    else:
        c = tl.load(c_ptr + offsets, mask).to(DTYPE)
        if MODE == "backward":
            tl.store(y_ptr + offsets, silu_prime * b * c, mask)
            tl.store(z_ptr + offsets, silu * c, mask)
        else:
            tl.store(y_ptr + offsets, silu_prime * b * c + silu * tl.load(d_ptr + offsets, mask).to(DTYPE), mask)


# The fused part and its first derivatives. All further ones are those of this function.
@pr.custom_op("swiglu::gated", differentiate="reference")
def gated(a, b, others=(), *, mode="value"):
    """`silu(a) * b`; `a_bar` and `b_bar` from `others = (y_bar,)`; `y_dot` from `others = (a_dot, b_dot)`."""
    sigmoid, others = a.sigmoid(), [x.contiguous() for x in others]
    silu, silu_prime = a * sigmoid, sigmoid * (1 + a * (1 - sigmoid))
    if mode == "value":
        return silu * b
    if mode == "backward":
        return silu_prime * b * others[0], silu * others[0]
    return silu_prime * b * others[0] + silu * others[1]


@gated.def_kernel("cuda")
def _(a, b, others=(), *, mode="value"):
    # Not of one shape where a vmap batches one of the weights.
    inputs = [x.contiguous() for x in torch.broadcast_tensors(a, b, *others)]
    y, z = torch.empty_like(inputs[0]), torch.empty_like(inputs[0]) if mode == "backward" else None
    if y.numel():
        pointers = [*inputs, *[None] * (4 - len(inputs)), y, z]
        with torch.cuda.device_of(y):
            gated_kernel[(triton.cdiv(y.numel(), 1024),)](y.numel(), *pointers, MODE=mode, BLOCK=1024)
    return y if z is None else (y, z)


@gated.def_vmap
def _(info, in_dims, inputs):
    def front(x, dim):
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    a, b, others = front(inputs.a, in_dims.a), front(inputs.b, in_dims.b), map(front, inputs.others, in_dims.others)
    return gated(a, b, tuple(others), mode=inputs.mode), 0


@pr.custom_op("swiglu::swiglu", namespace="swiglu")
def swiglu(weights, x):
    """`x: [*, rows, dim]` to `[*, rows, hidden]`; the weights may have leading dims, too."""
    return torch.nn.functional.silu(x @ weights.gate) * (x @ weights.up)


swiglu.def_kernel("cuda")(lambda weights, x: gated(x @ weights.gate, x @ weights.up))
# Nothing of the hidden size is kept: the backward pass multiplies again.
swiglu.def_save_for_backward(lambda inputs, output: (inputs.weights, inputs.x))


@swiglu.def_backward
def _(ctx, saved, y_bar):
    weights, x = saved
    a_bar, b_bar = gated(x @ weights.gate, x @ weights.up, (y_bar,), mode="backward")
    gate_bar = (x.mT @ a_bar).sum_to_size(weights.gate.shape)
    up_bar = (x.mT @ b_bar).sum_to_size(weights.up.shape)
    x_bar = a_bar @ weights.gate.mT + b_bar @ weights.up.mT
    return {"weights": Weights(gate_bar, up_bar), "x": x_bar.sum_to_size(x.shape)}


@swiglu.def_jvp
def _(inputs, output, tangents):
    weights, x, dots, x_dot = inputs.weights, inputs.x, tangents.weights, tangents.x
    a_dot, b_dot = x_dot @ weights.gate + x @ dots.gate, x_dot @ weights.up + x @ dots.up
    return gated(x @ weights.gate, x @ weights.up, (a_dot, b_dot), mode="jvp")


@swiglu.def_vmap
def _(info, in_dims, inputs):
    weights, dims = inputs.weights, in_dims.weights
    pairs = [(weights.gate, dims.gate), (weights.up, dims.up), (inputs.x, in_dims.x)]
    rank = max(x.dim() - (dim is not None) for x, dim in pairs)
    gate, up, x = (
        x if dim is None else x.movedim(dim, 0).unflatten(0, (info.batch_size, *[1] * (rank + 1 - x.dim())))
        for x, dim in pairs
    )
    return swiglu(Weights(gate, up), x), 0


def example(rows=4, dim=3, hidden=5, device="cpu", dtype=torch.float32):
    """Weights, inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = (dim, hidden), (dim, hidden), (rows, dim), (rows, hidden)
    gate, up, x, target = (torch.randn(s, generator=generator, dtype=dtype).to(device) for s in shapes)
    return Weights(gate, up), x, target


def loss(weights, x, target):
    """Mean square error of a model that is one SwiGLU."""
    return (swiglu(weights, x) - target).square().mean()


def train_step(weights, x, target, rate=0.1):
    """One step of gradient descent: the new weights, and the loss before it."""
    bars, value = pr.func.grad_and_value(loss, namespace="swiglu")(weights, x, target)
    return Weights(weights.gate - rate * bars.gate, weights.up - rate * bars.up), value


def main():
    """Check the rules, train, and differentiate."""
    torch.set_num_threads(1)  # for tensors so small, more only cost time
    weights, x, target = example(device="cuda" if torch.cuda.is_available() else "cpu")
    print(check_rules(swiglu, (weights, x)))
    step = torch.compile(train_step, fullgraph=True)
    for _ in range(3):
        weights, value = step(weights, x, target)
        print(f"loss {value.item():.4f}")
    ones = Weights(torch.ones_like(weights.gate), torch.zeros_like(weights.up))
    _, first = pr.func.jvp(lambda w: loss(w, x, target), (weights,), (ones,), namespace="swiglu")
    (product,) = pr.func.hvp(lambda w: loss(w, x, target), (weights,), (ones,), namespace="swiglu")
    print(f"first derivative {first.item():.4f}, curvature {product.gate.sum().item():.4f} along every gate weight")


if __name__ == "__main__":
    main()
