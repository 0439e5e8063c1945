"""The transforms inside one another, inside and around torch's own, over the operations of this package.

What is expected comes from the same nesting of torch's transforms over layer norm written out in elementary
operations, which torch differentiates rightly at every order.
"""

import itertools

import optree
import pytest
import torch
from func_trees import NAMESPACE, Affine, assert_leaves, assert_tree, leaves, like, randn

import primitives as pr
from primitives import func

SIZE = 4
PR, TORCH = "primitives", "torch"


def written_out(x, w, b):
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w + b


def normalized(tree, x):
    return pr.functional.layer_norm(x, (SIZE,), tree.w, tree.b)


def energy(tree, x):
    return normalized(tree, x).pow(3).sum()


def flat_energy(w, b, x):
    return written_out(x, w, b).pow(3).sum()


@pytest.fixture(name="point")
def _point():
    torch.manual_seed(6)
    return Affine(randn(SIZE), randn(SIZE)), randn(3, SIZE)


def flat(point):
    return tuple(leaves(point))


# One derivative along fixed directions, by each library and mode: scalar function of flat tensors -> the same.


def along(mode, library, directions):
    module = func if library == PR else torch.func

    def derivative(function):
        if mode == "jvp":
            return lambda *tensors: module.jvp(function, tensors, directions)[1]
        gradient = module.grad(function, tuple(range(len(directions))))
        return lambda *tensors: sum((g * d).sum() for g, d in zip(gradient(*tensors), directions, strict=True))

    return derivative


@pytest.mark.parametrize("libraries", [(PR,) * 3, (PR, TORCH, PR), (TORCH, PR, TORCH)], ids="-".join)
@pytest.mark.parametrize("modes", list(itertools.product(("jvp", "grad"), repeat=3)), ids="-".join)
def test_every_nesting_to_order_three_in_both_libraries(point, modes, libraries):
    directions = [tuple(flat(like(point))) for _ in range(3)]
    tensors = flat(point)

    def ours(w, b, x):
        return energy(Affine(w, b), x)

    expected = flat_energy
    for mode, library, direction in zip(modes, libraries, directions, strict=True):
        ours = along(mode, library, direction)(ours)
        expected = along(mode, TORCH, direction)(expected)
        torch.testing.assert_close(ours(*tensors), expected(*tensors))


@pytest.mark.parametrize("outer, inner", list(itertools.product([func.jacrev, func.jacfwd], repeat=2)))
def test_hessian_in_all_modes(point, outer, inner):
    expected = torch.func.hessian(flat_energy, (0, 1, 2))(*flat(point))
    result = outer(inner(energy, (0, 1), namespace=NAMESPACE), (0, 1), namespace=NAMESPACE)(*point)
    assert_leaves(result, [block for row in expected for block in row])


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}])
def test_gradients_of_samples_and_of_a_map(point, options):
    tree, x = point
    gradient = func.grad(energy, namespace=NAMESPACE)
    result = func.vmap(gradient, (None, 0), namespace=NAMESPACE, **options)(tree, x)
    expected = torch.func.vmap(torch.func.grad(flat_energy, (0, 1)), (None, None, 0))(*flat(point))
    assert_leaves(result, expected)
    assert_leaves(torch.func.vmap(lambda row: flat(gradient(tree, row)))(x), expected)

    def mapped(tree, x):
        return func.vmap(energy, (None, 0), namespace=NAMESPACE, **options)(tree, x).square().sum()

    def rows(w, b, x):
        return torch.stack([flat_energy(w, b, row) for row in x]).square().sum()

    result = func.grad(mapped, (0, 1), namespace=NAMESPACE)(tree, x)
    assert_leaves(result, torch.func.grad(rows, (0, 1, 2))(*flat(point)))


def test_vjp_under_vmap_and_jvp(point):
    output, vjp_fn = func.vjp(normalized, *point, namespace=NAMESPACE)
    cotangents = randn(5, *output.shape)
    batched = func.vmap(vjp_fn, namespace=NAMESPACE)(cotangents)
    for i, cotangent in enumerate(cotangents):
        assert_tree(optree.tree_map(lambda leaf, i=i: leaf[i], batched, namespace=NAMESPACE), vjp_fn(cotangent))

    def pulled(tree, x):
        return func.vjp(normalized, tree, x, namespace=NAMESPACE)[1](cotangents[0])

    def flat_pulled(*tensors):
        return torch.func.vjp(lambda w, b, x: written_out(x, w, b), *tensors)[1](cotangents[0])

    tangents = like(point)
    _, result = func.jvp(pulled, point, tangents, namespace=NAMESPACE)
    assert_leaves(result, torch.func.jvp(flat_pulled, flat(point), flat(tangents))[1])


def test_eager_autograd_and_forward_ad_see_through(point):
    tree, x = point
    w = tree.w.clone().requires_grad_()
    func.grad(energy, namespace=NAMESPACE)(Affine(w, tree.b), x).w.sum().backward()
    expected = torch.func.grad(lambda w: torch.func.grad(flat_energy)(w, tree.b, x).sum())(tree.w)
    torch.testing.assert_close(w.grad, expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tree.w, torch.ones_like(tree.w))
        result = func.grad(energy, namespace=NAMESPACE)(Affine(dual, tree.b), x).w
        tangent = torch.autograd.forward_ad.unpack_dual(result).tangent
    torch.testing.assert_close(tangent, expected)
