"""What is public: its names and pages, and examples, each of which runs when pasted into a file of its own."""

import ast
import doctest
import inspect
import pathlib
import pickle
import re
import traceback
import types

import pytest
import torch
import torch.nn.functional as F

import primitives as pr

ROOT = pathlib.Path(pr.__file__).parent
PAGES = ROOT.parent / "docs"
MODULES = (pr, *(each for name in pr.__all__ if inspect.ismodule(each := getattr(pr, name))))
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Types that functions return, and that rules are handed.
RETURNED = (
    *(pr.AuditReport, pr.Finding, pr.custom.BackwardContext, pr.custom.CustomOp, pr.custom.VmapInfo),
    *(pr.functional.BatchNormOutput,),
    *(
        pr.testing.KernelReport,
        pr.testing.Report,
        pr.testing.Row,
        pr.tracing.JointGraph,
        pr.tracing.PhiloxState,
    ),
    *(pr.tracing.PureFunction, pr.tracing.PureModule, pr.tracing.SubclassSpec, pr.tracing.Unwrapped),
)


def documented():
    """All public names with their docstrings, methods included."""
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isroutine(value) or inspect.isclass(value):
                yield f"{module.__name__}.{name}", value
            for method, own in vars(value).items() if inspect.isclass(value) else ():
                if inspect.isroutine(own) and not method.startswith("_"):
                    yield f"{module.__name__}.{name}.{method}", own


DOCUMENTED = dict(documented())
EXAMPLES = {path: found for path, value in DOCUMENTED.items() if (found := inspect.getdoc(value)) and ">>>" in found}


@pytest.mark.parametrize("path", EXAMPLES)
def test_the_example_runs_alone(path):
    namespace = {"__name__": "__main__"}
    test = doctest.DocTestParser().get_doctest(EXAMPLES[path], namespace, path, None, 0)
    written = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=written.append, clear_globs=False)
    assert not written, "".join(written)


def test_whatever_is_public_has_an_example_and_none_is_left_out():
    modules = {module.__name__ for module in MODULES}
    for path, value in DOCUMENTED.items():
        is_error = inspect.isclass(value) and issubclass(value, Exception)
        is_method = path.rpartition(".")[0] not in modules
        assert path in EXAMPLES or is_method or is_error or value in RETURNED, path
    texts = [text for path in ROOT.rglob("*.py") if ">>>" in (text := path.read_text(encoding="utf-8"))]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    written = {ast.get_docstring(node) for node in nodes if isinstance(node, kinds)}
    assert {text for text in written if text and ">>>" in text} == {*EXAMPLES.values()}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_what_is_public_goes_by_its_public_name(module):
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, (type, types.FunctionType)):
            assert value.__module__ in (module.__name__, "primitives"), name
            assert pickle.loads(pickle.dumps(value)) is value
    assert {name for name in dir(module) if not name.startswith("__")} | {"__version__"} == {
        *module.__all__,
        "__version__",
    }


# Arguments that torch deprecates, and how its own loss is to be cut.
NOT_TAKEN = {"only_inputs", "grad_variables", "options"}


@pytest.mark.parametrize("ours, theirs", [(pr.func, torch.func), (pr.autograd, torch.autograd), (pr.functional, F)])
def test_what_has_a_name_of_torchs_takes_its_arguments(ours, theirs):
    if ours is pr.func:
        assert {name for name in dir(theirs) if not name.startswith("_")} <= {*ours.__all__}
    for name in {*ours.__all__}.intersection(dir(theirs)):
        try:
            wanted = inspect.signature(getattr(theirs, name)).parameters
        except ValueError:
            # Of a builtin, Python knows none.
            continue
        found = inspect.signature(getattr(ours, name)).parameters
        assert all(p.kind is p.KEYWORD_ONLY for key, p in found.items() if key not in wanted), name
        for place, (argument, parameter) in enumerate(wanted.items()):
            if argument in NOT_TAKEN or argument.startswith("_"):
                continue
            assert found[argument].default == parameter.default, (name, argument)
            # Nothing else at its place: an argument of torch's call lands where it did, or is refused.
            assert found[argument].kind is inspect.Parameter.KEYWORD_ONLY or [*found][place] == argument, name


def test_every_error_is_public_under_one_base():
    found = [pr.PrimitivesError]
    for cls in found:
        found += cls.__subclasses__()
    public = {cls.__name__: cls for cls in found if not cls.__name__.startswith("_")}
    assert len(public) > 12
    assert {name: getattr(pr, name) for name in public} == public
    assert traceback.format_exception_only(pr.ShapeError("x")) == ["primitives.ShapeError: x\n"]
    # Of what Python raises for the like of it, too.
    assert all(len(cls.__mro__) > 4 for cls in public.values() if cls is not pr.PrimitivesError)


def test_a_name_that_lives_elsewhere_and_a_context_that_was_not_called():
    with pytest.raises(AttributeError, match=r"'convert'\. Did you mean primitives\.nn\.convert\?"):
        _ = pr.convert
    with pytest.raises(AttributeError, match=r"'nonsense'\.$"):
        _ = pr.nonsense
    for context in (pr.repair_torch, pr.use_backend):
        with pytest.raises(TypeError, match=rf"as in `with {context.__name__}\(\.\.\.\):`"), context:
            pass


def test_the_api_shows_every_public_name():
    modules = {module.__name__.rpartition(".")[2]: module for module in MODULES[1:]}
    shown = [
        name
        for page in PAGES.glob("api/*.md")
        for name in re.findall(r"^::: primitives\.(\S+)$", page.read_text(), re.M)
    ]
    # A module whole, or each of its names, once.
    wanted = {f"{name}.{of}" for name, module in modules.items() if name not in shown for of in module.__all__}
    wanted |= {name for name in pr.__all__ if not name.endswith("Error") and name not in {*modules, "__version__"}}
    assert wanted - {"custom_op"} <= {*shown}
    assert len({*shown}) == len(shown)
