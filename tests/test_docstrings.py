"""Examples of docstrings: each public function and module has one, which runs when pasted into a file of its own."""

import ast
import doctest
import inspect
import pathlib

import pytest

import primitives as pr

ROOT = pathlib.Path(pr.__file__).parent
MODULES = (pr, pr.autograd, pr.custom, pr.decompositions, pr.func, pr.functional, pr.nn, pr.testing, pr.tracing)
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
        pr.tracing.PureFunction,
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
