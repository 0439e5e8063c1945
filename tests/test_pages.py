"""Pages of Markdown: tables are whole, examples and figures are so, links lead somewhere."""

import functools
import re
from pathlib import Path

import pytest
import torch

import primitives

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def torn_tables(text):
    """Line numbers of rows of tables that do not fit the header, or have none."""
    prose = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    width, above = 0, 0
    for number, line in enumerate(prose.splitlines(), 1):
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1 if line.startswith("|") else 0
        if cells and not above:
            width, delimiter = cells, number + 1
        is_rule = re.fullmatch(r"(\| ?:?-+:? ?)+\|", line)
        if cells and (cells != width or not line.endswith("|") or (number == delimiter and not is_rule)):
            yield number
        above = cells


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page):
    assert [*torn_tables(page.read_text(encoding="utf-8"))] == []


# The README's example is run below, as it stands without prompts.
@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_are_doctests(page):
    blocks = re.findall(r"^```(python|py|pycon)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    # Without the empty line doctest takes the fence for output.
    assert [
        block for kind, block in blocks if kind != "pycon" or ">>>" not in block or not block.endswith("\n\n")
    ] == []


# The build of the site follows the links of docs.
@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:|#)([^)#\s]+)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        found = ROOT / target
        assert found.exists(), target
        headings = re.findall(r"^#+ (.*)", found.read_text(encoding="utf-8"), flags=re.MULTILINE) if anchor else ()
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{target}#{anchor}"


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_versions_agree():
    assert f"\nversion: {primitives.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    tested = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    said = re.findall(r"Python :: (3\.\d+)", metadata)
    pythons = re.findall(r'python: "(3\.\d+)"', tested)
    # Both ends, and one between.
    assert [said[0], said[-1]] == [pythons[0], pythons[-1]]
    assert {*pythons} <= {*said}
    torches = re.findall(r"torch: (2\.\d+)", tested)
    assert re.search(r"torch (2\.\d+) to (2\.\d+)", README).groups() == (torches[0], torches[-1])


def test_the_readme_is_short():
    assert len(README.split()) <= 500


def test_front_pages_have_the_figures_of_measured_pages():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    measured = (ROOT / "docs" / "reference" / "torch_derivatives.md").read_text(encoding="utf-8")
    for who, figures in re.findall(r"^\| (torch|repaired) (\| \d+ \| \d+ \| \d+) ", measured, re.MULTILINE):
        assert all(re.search(rf"\| {who}[ \d.]* {re.escape(figures)}\b", page) for page in (README, index))
    steps = (ROOT / "docs" / "perf" / "compile.md").read_text(encoding="utf-8")
    for other in ("eager", "jax.jit"):
        figures = re.search(rf"ours / {other}: (\S+) in the geometric mean of \d, (\S+) at most", steps).groups()
        assert f"| {other} | {' | '.join(figures)} |" in index


def test_the_example_prints_what_it_says(capsys, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.setattr(primitives, "compile", functools.partial(primitives.compile, backend="eager"))
    names = {}
    try:
        with torch.random.fork_rng():
            exec(compile(example, "README.md", "exec"), names)
    finally:
        primitives.repair_torch().undo()
    assert capsys.readouterr().out.splitlines() == re.findall(r"# (.* off)$", example, flags=re.MULTILINE)
    assert all(p.grad is not None for p in names["net"].parameters() if p.dim() > 1)
