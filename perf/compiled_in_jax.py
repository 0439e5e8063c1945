"""Losses of `perf/compiled_losses.py` in JAX, an optional package, by the same names."""

from __future__ import annotations

import os
from typing import Any

# Before JAX starts. It shares a GPU with torch.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from collections.abc import Callable, Sequence

import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
from torch import nn

from perf.compiled_losses import Case

__all__ = ["jax_step"]


ACTIVATIONS = {"Tanh": jnp.tanh, "SiLU": jax.nn.silu}


def values_of(layer: nn.Module) -> tuple[Any, ...]:
    """The parameters of a layer of torch; a matrix lies as JAX multiplies by it."""
    return tuple(jnp.asarray(p.detach().numpy().T) for p in layer.parameters())


def net(layers: Sequence[nn.Module], params: list[tuple[Any, ...]], x: Any) -> Any:
    """A network of torch that is a chain of linear layers, layer norms and activations."""
    for layer, values in zip(layers, params, strict=True):
        if isinstance(layer, nn.Linear):
            x = x @ values[0] + values[1]
        elif values:
            c = x - x.mean(-1, keepdims=True)
            x = c * jax.lax.rsqrt((c**2).mean(-1, keepdims=True) + 1e-5) * values[0] + values[1]
        else:
            x = ACTIVATIONS[type(layer).__name__](x)
    return x


def burgers_reverse(f: Any, xt: Any) -> Any:
    x, t = xt[:, :1], xt[:, 1:]

    def u(x: Any, t: Any) -> Any:
        return f(jnp.concatenate([x, t], 1))

    u_x = jax.grad(lambda x, t: u(x, t).sum(), 0)
    u_xx = jax.grad(lambda x, t: u_x(x, t).sum(), 0)(x, t)
    g_x, g_t = jax.grad(lambda x, t: u(x, t).sum(), (0, 1))(x, t)
    return jnp.mean((g_t + u(x, t) * g_x - 0.01 * u_xx) ** 2)


def burgers_forward(f: Any, xt: Any) -> Any:
    e_x, e_t = jnp.zeros_like(xt).at[:, 0].set(1), jnp.zeros_like(xt).at[:, 1].set(1)
    (u, u_x), (_, u_xx) = jax.jvp(lambda z: jax.jvp(f, (z,), (e_x,)), (xt,), (e_x,))
    return jnp.mean((jax.jvp(f, (xt,), (e_t,))[1] + u * u_x - 0.01 * u_xx) ** 2)


def penalty(f: Any, x: Any) -> Any:
    y, back = jax.vjp(f, x)
    (g,) = back(jnp.ones_like(y))
    return y.mean() + ((jnp.sqrt((g**2).sum(1)) - 1) ** 2).mean()


def forces(f: Any, x: Any) -> Any:
    def energy(x: Any) -> Any:
        d = jnp.sqrt(((x[:, :, None] - x[:, None]) ** 2).sum(-1, keepdims=True) + 0.1)
        return f(jnp.concatenate([d, 1 / d, jnp.exp(-d)], -1)).sum((1, 2, 3))

    e, back = jax.vjp(energy, x)
    return (e**2).mean() + (back(jnp.ones_like(e))[0] ** 2).mean()


def laplacian(f: Any, x: Any) -> Any:
    hessian = jax.vmap(jax.hessian(lambda z: f(z).sum()))(x)
    return ((jnp.trace(hessian, axis1=1, axis2=2) - 1) ** 2).mean()


LOSSES = (burgers_reverse, burgers_forward, penalty, forces, laplacian)


def jax_step(case: Case, device: str) -> Callable[[], Any] | None:
    """The step of a case: loss and gradients of all weights; None where nobody wrote it in JAX."""
    loss = next((loss for loss in LOSSES if loss.__name__ == case.loss.__name__), None)
    if loss is None:
        return None
    # Products as exact as torch's.
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_default_device", jax.devices(device)[0])
    layers = [*case.net().children()]
    params, x = list(map(values_of, layers)), jax.random.uniform(jax.random.PRNGKey(1), case.shape)
    run = jax.jit(jax.value_and_grad(lambda p, x: loss(lambda z: net(layers, p, z), x)))
    return lambda: jax.block_until_ready(run(params, x))
