"""The front end around a call: batching, autocast, implementations, memory, threads, the fast path, written tensors."""

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jacfwd, jacrev, vmap
from torch.testing import assert_close

import primitives as pr
from primitives._core.fast_path import fast_path_keys, state_of_new_threads
from primitives._core.write_back import count_up, write_back
from primitives.ops.norms.layer_norm import NormOptions, layer_norm_p
from tests.custom_ops import define, operator
from tests.support import data

X = torch.tensor([1.0, 2.0])


def cube_rules():
    return {
        "reference": lambda x: x.pow(3.0),
        "vjp": lambda r, c, output_mask: {"x": 3.0 * r.x.square() * c.y},
        "jvp": lambda r, t: 3.0 * r.x.square() * t.x,
    }


@pytest.mark.parametrize(
    "wanted, outputs, wrongs",
    [
        ("a tensor", "Tensor y", [None, 3, (X,), [X], (X, X)]),
        ("a tuple of 2 tensors", "(Tensor y, Tensor z)", [None, X, (X,), (X, 1.0), [X] * 3]),
        ("a list of tensors", "Tensor[] ys", [None, X, [None], [X, 1.0]]),
        ("a tuple of 0 tensors", "()", [X, 3]),
    ],
    ids=["tensor", "tuple", "list", "nothing"],
)
def test_outputs_that_are_not_the_schemas_raise(wanted, outputs, wrongs):
    for wrong in wrongs:
        op = define(f"(Tensor x) -> {outputs}", rules={"reference": lambda x, wrong=wrong: wrong})
        for call in (op, op.overload):
            with pytest.raises(TypeError, match=f"an implementation must return {wanted}, got "):
                call(X)


def test_outputs_come_as_the_schema_says():
    """A list for a tuple and a tuple for a list are converted, and nothing is detached by that."""
    rules = {"reference": lambda x: [x * 2, x * 3], "vjp": lambda r, c, output_mask: {"x": 2 * c.y + 3 * c.z}}
    op = define("(Tensor x) -> (Tensor y, Tensor z)", rules=rules)
    assert type(op(X)) is tuple
    assert grad(lambda x: sum(op(x)).sum())(X).tolist() == [5.0, 5.0]
    for kept in ([X * 2], (X * 2,)):
        ys = define("(Tensor x) -> Tensor[] ys", rules={"reference": lambda x, kept=kept: kept})(X)
        assert type(ys) is list
        assert ys is not kept
    assert define("(Tensor x) -> ()", rules={"reference": lambda x: None})(X) is None
    # The list of the caller is not the implementation's to change.
    xs = [X, X]
    define("(Tensor[] xs, float s) -> Tensor y", rules={"reference": lambda xs, s: xs.pop() * s})(xs, 2.0)
    assert len(xs) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda op: op(op(data(64).requires_grad_())).sum().backward(),
        lambda op: torch.autograd.grad(op(x := data(64).requires_grad_()).sum(), x, create_graph=True),
        lambda op: jacfwd(jacrev(op))(data(4)),
        lambda op: vmap(grad(op))(data(64)),
    ],
    ids=["backward", "double", "jacfwd jacrev", "vmap"],
)
@pytest.mark.parametrize("way", ["x", "y", "custom"])
def test_a_call_frees_its_tensors(call, way):
    references, rules = [], cube_rules()

    def reference(x):
        y = x.pow(3.0)
        references.extend([weakref.ref(x), weakref.ref(y)])
        return y

    if way == "custom":
        op = operator(reference, differentiate="reference")
        op.def_vmap(lambda info, in_dims, inputs: (op(inputs.x), in_dims.x))
    else:
        op = define(rules={**rules, "reference": reference}, residuals=("x", way)[way == "x" :], decomposable=True)
    # The first call of a transform imports modules of torch, which leaves cycles behind.
    call(op)
    references.clear()
    gc.disable()
    try:
        call(op)
        assert references
        assert [reference() for reference in references if reference() is not None] == []
    finally:
        gc.enable()


class Watching(torch.Tensor):
    """A subclass, which torch shows every call."""

    seen: tuple = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Watching.seen += (func,)
        return super().__torch_function__(func, types, args, kwargs or {})


MODES = [
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    FakeTensorMode,
    lambda: torch.device("cpu"),
    torch.inference_mode,
    lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True),
]


def test_plain_eager_calls_alone_take_the_fast_path():
    x, outside = torch.zeros(2), state_of_new_threads()
    assert fast_path_keys([x, torch.nn.Parameter(x)]) is not None
    with torch.no_grad():
        assert fast_path_keys([x]) is not None
    assert fast_path_keys([x, x.as_subclass(Watching)]) is None
    assert fast_path_keys([x, x.to("meta")]) is None
    inside = []
    grad(lambda y: (inside.append(fast_path_keys([x])), y.sum())[1])(x)
    assert inside == [None]
    for mode in MODES:
        with mode():
            assert fast_path_keys([x]) is None, mode
            # The package may be imported in here, too.
            assert state_of_new_threads() == outside


def test_what_the_dispatcher_converts_and_shows_it_still_does():
    x, weight = torch.arange(6.0).view(2, 3).requires_grad_(), torch.ones(3, requires_grad=True)
    expected = layer_norm_p(x, weight, None, *NormOptions(1, 1.0))[0]
    for eps in (1, torch.tensor(1.0), True):
        y = layer_norm_p(x, weight, None, *NormOptions(1, eps))[0]
        assert torch.equal(y, expected)
        assert type(y.grad_fn) is type(expected.grad_fn)
    keyword = define("(Tensor x, *, float s) -> Tensor y", rules={"reference": lambda x, s: x * s})
    wrong = [
        (x, weight, None, 1, 0),
        (x, weight, None, *NormOptions(1.5, 1.0)),
        (x, "weight", None, *NormOptions(1, 1.0)),
    ]
    for op, args in (*[(layer_norm_p, args) for args in wrong], (keyword, (X, 2.0))):
        with pytest.raises(RuntimeError):
            op(*args)
    layer_norm_p(x.detach().as_subclass(Watching), None, None, *NormOptions(1, 1.0))
    assert layer_norm_p.overload in Watching.seen
    with torch._C._AutoDispatchBelowAutograd():
        assert not layer_norm_p(x, None, None, *NormOptions(1, 1.0))[0].requires_grad


def test_write_back_writes_in_place_and_counts_a_version():
    targets, values, counter = [data(3), data(2, 2)], [data(3, seed=1), data(2, 2, seed=1)], torch.tensor(3)
    pointers = [t.data_ptr() for t in targets]
    write_back(targets, [value.requires_grad_() * 1 for value in values])
    assert_close(targets, [value.detach() for value in values], rtol=0, atol=0)
    assert [(t._version, t.requires_grad, t.data_ptr()) for t in targets] == [(1, False, p) for p in pointers]
    with pytest.raises(pr.MutationError):
        write_back([values[0]], [targets[0]])
    grad(lambda x: (count_up(counter), x.sum())[1])(torch.ones(2))
    assert (counter.item(), counter._version) == (4, 1)
