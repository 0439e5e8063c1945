"""The first six steps of `perf/compiled_losses.py` in JAX, an optional package."""

from __future__ import annotations

import itertools
import os
from typing import Any

# Before JAX starts. It shares a GPU with torch.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from collections.abc import Callable, Sequence

import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]

from perf.compiled_losses import CASES

__all__ = ["jax_step"]


def init(sizes: Sequence[int], *, norm: bool) -> list[tuple[Any, ...]]:
    key, params = jax.random.PRNGKey(0), []
    for k, (i, o) in enumerate(itertools.pairwise(sizes)):
        key, use = jax.random.split(key)
        scale = [jnp.ones(o), jnp.zeros(o)] if norm and k < len(sizes) - 2 else []
        params.append((jax.random.uniform(use, (i, o), minval=-1, maxval=1) / i**0.5, jnp.zeros(o), *scale))
    return params


def net(params: list[tuple[Any, ...]], x: Any, act: Any) -> Any:
    for w, b, *norm in params[:-1]:
        x = x @ w + b
        if norm:
            c = x - x.mean(-1, keepdims=True)
            x = c * jax.lax.rsqrt((c**2).mean(-1, keepdims=True) + 1e-5) * norm[0] + norm[1]
        x = act(x)
    w, b = params[-1][:2]
    return x @ w + b


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


# By the place of the step in `CASES`: loss, sizes of the network, whether it has norms, and its activation.
STEPS: tuple[tuple[Any, Sequence[int], bool, Any], ...] = (
    (burgers_reverse, [2, 32, 32, 32, 32, 1], False, jnp.tanh),
    (burgers_forward, [2, 32, 32, 32, 32, 1], False, jnp.tanh),
    (burgers_reverse, [2, 64, 64, 64, 64, 1], False, jnp.tanh),
    (penalty, [64, 128, 128, 128, 1], True, jax.nn.silu),
    (forces, [3, 32, 32, 1], False, jax.nn.silu),
    (laplacian, [3, 32, 32, 1], False, jnp.tanh),
)


def jax_step(name: str, device: str) -> Callable[[], Any] | None:
    """The step of this name: loss and gradients of all weights; None where nobody wrote it in JAX."""
    written = {case.name: (case.shape, *step) for case, step in zip(CASES, STEPS, strict=False)}
    if name not in written:
        return None
    shape, loss, sizes, norm, act = written[name]
    # Products as exact as torch's.
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_default_device", jax.devices(device)[0])
    params, x = init(sizes, norm=norm), jax.random.uniform(jax.random.PRNGKey(1), shape)
    run = jax.jit(jax.value_and_grad(lambda p, x: loss(lambda z: net(p, z, act), x)))
    return lambda: jax.block_until_ready(run(params, x))
