"""The pages say what is there: links lead somewhere, named functions exist, marked examples run."""

import ast
import contextlib
import doctest
import functools
import io
import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from nvme_offload import OffloadConfig
from nvme_offload.perf import cli
from tests.support.fragments import ELSEWHERE
from tests.support.fragments import PAGES as FRAGMENTS

ROOT = Path(__file__).parent.parent
INDEX = ROOT / "docs" / "README.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
CLAIM = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+\.(?:py|cpp|hpp))\)\s*\((?P<names>`[^)]*`)\)")
DRIVES = ("/mnt/nvme0", "/mnt/nvme1")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page):
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page):
    """Relative links as (path, anchor)."""
    text = CODE_SPAN.sub("", re.sub(r"^ {4}.*$", "", prose(page), flags=re.MULTILINE))
    for match in LINK.finditer(text):
        target, _, anchor = match["target"].partition("#")
        if "://" not in target and not target.startswith("mailto:"):
            yield (page.parent / target).resolve() if target else page, anchor


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def claims(page):
    """Pairs of a source file and a name that the page says is in it."""
    for match in CLAIM.finditer(prose(page)):
        for name in re.findall(r"`([^`]+)`", match["names"]):
            yield (page.parent / match["target"]).resolve(), name


@functools.cache
def defined_in_python(source):
    """Dotted names of classes, functions and assigned names."""
    names = set()

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(source), "")
    return names


def is_defined(path, name):
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return name in defined_in_python(source)
    return re.search(rf"\b{re.escape(name)}\(", source) is not None


@by_page
def test_links_lead_somewhere(page):
    for path, anchor in links(page):
        assert path.exists(), f"{page.name} links to {path}, which does not exist"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name} links to #{anchor}, which is no heading of {path.name}"


@by_page
def test_prose_has_at_most_100_columns(page):
    """But for rows of tables, and words and code that cannot be broken."""
    lines = [line for line in prose(page).splitlines() if not line.startswith(("|", "    "))]
    assert not [line for line in lines if len(line) > 100 and " " in CODE_SPAN.sub("", line).strip("- ")]


def test_pictures_can_be_read_on_a_phone_in_light_and_dark():
    """A terminal's is as small as its 80 columns. Each picture stands on a page, with words for those who see none."""
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", prose(page))
    }
    assert shown == set((ROOT / "docs" / "pictures").iterdir())
    for picture in (each for each in shown if each.stem != "top"):
        text = picture.read_text(encoding="utf-8")
        (width,) = (float(each) for each in re.findall(r'viewBox="0 0 (\d+) ', text))
        assert 400 / width * min(float(each) for each in re.findall(r"font:(\d+)px", text)) >= 11, picture
        assert (
            max(float(x) + float(wide) for x, wide in re.findall(r'<rect.* x="([\d.]+)".* width="([\d.]+)"', text))
            <= width
        )
        light, dark = (
            dict(re.findall(r"\.(\w+)\{color:(#\w+)\}", part)) for part in text.split("prefers-color-scheme")
        )
        assert {*re.findall(r'class="(\w+)', text)} <= light.keys() == dark.keys()
        assert light["ink"] != dark["ink"]


@by_page
def test_named_functions_exist(page):
    for path, name in claims(page):
        assert path.exists(), f"{page.name} names {name} in {path}, which does not exist"
        assert is_defined(path, name), f"{page.name} says that {path.relative_to(ROOT)} has {name}; it has not"


def test_claims_are_found():
    """The two tests above would pass on pages in which they find nothing."""
    found = [name for path, name in claims(ROOT / "docs" / "architecture.md")]
    assert len(found) > 40
    assert {"OffloadOptimizer.step", "update_loop", "Ring::serve"} <= set(found)
    assert not is_defined(ROOT / "optim" / "named_optimizers.py", "OffloadAdamW.stepp")
    assert not is_defined(ROOT / "aio_native" / "src" / "ring.cpp", "Ring::serves")


def test_every_hazard_names_its_test():
    """That it exists says `test_named_functions_exist`."""
    page = ROOT / "docs" / "hazards.md"
    tables = page.read_text(encoding="utf-8").partition("\n## On the drive\n")[2]
    rows = re.findall(r"^\|(?!---\|)(?! What \|).*\|$", tables, re.MULTILINE)
    assert len(rows) > 60
    assert not [row for row in rows if not CLAIM.search(row.rpartition(" | ")[2])]
    named = [name for path, name in claims(page) if path.suffix == ".py"]
    assert len(named) > 80
    assert not [name for name in named if not name.split(".")[-1].startswith("test_")]


def test_the_life_of_a_gradient_names_each_stage(tmp_path):
    """Every numbered stage has its function, and the page breaks when one of them gets another name."""
    page = ROOT / "docs" / "life_of_a_gradient.md"
    text = page.read_text(encoding="utf-8")
    stages = re.findall(r"^(\d+)\. \*\*.*?(?=^\d+\. |^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert stages == [str(number) for number in [*range(1, 16), *range(1, 10)]]
    for stage in re.finditer(r"^\d+\. \*\*.*?(?=^\d+\. |^#|\Z)", text, re.MULTILINE | re.DOTALL):
        own = "`p.grad` is the gradient partition" in stage[0]  # torch's
        assert CLAIM.search(stage[0]) or own, f"no function is named in: {stage[0]}"
    named = [(path, name) for path, name in claims(page)]
    assert len(named) > 50
    for path, name in {(path, name) for path, name in named if path.suffix == ".py"}:
        last = name.rpartition(".")[2]
        renamed = tmp_path / "renamed.py"
        renamed.write_text(re.sub(rf"\b{last}\b", f"{last}_2", path.read_text(encoding="utf-8")), encoding="utf-8")
        assert not is_defined(renamed, name)


def test_the_way_of_a_gradient_is_short():
    """What somebody who follows it has to open, and how often they have to turn back."""
    page = (ROOT / "docs" / "life_of_a_gradient.md").read_text(encoding="utf-8")
    way = page[page.index("## A gradient, from loss") : page.index("## A parameter, from initial")]
    files = [match["target"] for match in CLAIM.finditer(way)]
    visits = [file for file, before in zip(files, [None, *files], strict=False) if file != before]
    assert len(set(visits)) <= 11, visits
    assert len(visits) - len(set(visits)) <= 4, visits


def test_every_helper_is_in_the_index_of_the_tests():
    """And no other file is named there: links to these lead somewhere."""
    index = ROOT / "tests" / "README.md"
    helpers = {path for path in (ROOT / "tests" / "support").glob("*.py") if path.stem != "__init__"}
    helpers |= set((ROOT / "tests" / "support").glob("*/__init__.py"))
    listed = {path for path, _ in links(index)}
    assert helpers <= listed, f"tests/README.md does not say what to take {helpers - listed} for"
    assert not [path for path in listed if not path.is_file()]


def test_every_page_is_in_the_index():
    listed = {path for path, _ in links(INDEX)}
    missing = [page.name for page in PAGES if INDEX.parent in page.parents and page not in {INDEX, *listed}]
    assert not missing, f"docs/README.md does not list {missing}"


def blocks(page, info=None):
    """Blocks that begin with three backticks, and with `info` if that is given, in order."""
    return [block for block in FENCE.finditer(page.read_text(encoding="utf-8")) if info in (None, block["info"])]


def outputs(page):
    """A page says what its blocks print: by the start of a block, the text of the output behind it."""
    found = blocks(page)
    return {block.start(): said["body"] for block, said in pairwise(found) if said["info"] == "text output"}


def assert_printed(page, block, printed):
    """Compare what a block printed with what its page says; ``...`` stands for anything."""
    said = outputs(page).get(block.start())
    if said is not None:
        same = doctest.OutputChecker().check_output(said, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert same, f"{page.name} says\n{said}\nprinted\n{printed}"


def on_these(drives, code):
    """A block with drives of the test in place of those that are shown."""
    for shown, drive in zip(DRIVES, drives, strict=True):
        code = code.replace(shown, str(drive))
    return code


@pytest.fixture
def drives(tmp_path, monkeypatch):
    """Folders for swap files beside the one where the reader is; nothing is left in them."""
    (tmp_path / "reader").mkdir()
    monkeypatch.chdir(tmp_path / "reader")
    drives = [tmp_path / f"nvme{number}" for number in range(len(DRIVES))]
    for drive in drives:
        drive.mkdir()
    yield drives
    assert [list(drive.iterdir()) for drive in drives] == [[], []]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "page", [each for each in PAGES if blocks(each, "python runnable")], ids=lambda page: page.name
)
def test_code_blocks_run(page, drives):
    """The blocks of a page follow each other, as a reader would type them; nothing is left on the drives."""
    torch.manual_seed(0)
    namespace = {"__name__": page.stem}
    for block in blocks(page, "python runnable"):
        first_line = page.read_text(encoding="utf-8")[: block.start("body")].count("\n")
        code = "\n" * first_line + on_these(drives, block["body"])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, str(page), "exec"), namespace)  # errors name the page's own line
        assert_printed(page, block, printed.getvalue())


SLOW = pytest.mark.slow
IMPORTS_TRANSFORMERS = ("docs/configuration.md", "docs/hugging_face.md")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] * (name in IMPORTS_TRANSFORMERS)) for name in FRAGMENTS]
)
def test_fragments_run_with_what_a_reader_has_by_then(name, drives, monkeypatch):
    """Blocks that are shown without their beginning."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    page, names = ROOT / name, {"__name__": "reader"}
    before = FRAGMENTS[name](names, drives[0])
    for block in blocks(page, "python"):
        names.update(next(before))
        first_line = page.read_text(encoding="utf-8")[: block.start("body")].count("\n")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile("\n" * first_line + on_these(drives, block["body"]), name, "exec"), names)
    assert next(before, None) is None, "what comes after the last block"


def test_every_fragment_is_run_somewhere():
    shown = {str(page.relative_to(ROOT)) for page in PAGES if blocks(page, "python")}
    assert shown == {*FRAGMENTS, *ELSEWHERE}
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())


@by_page
def test_sections_on_a_page_are_read(page):
    for block in blocks(page):
        if block["info"] in ("json", "toml"):
            section = (json if block["info"] == "json" else tomllib).loads(block["body"])
            with warnings.catch_warnings(action="ignore"):  # of keys that mean nothing here, which a page may explain
                OffloadConfig.of(section)


TUTORIALS = [INDEX.parent / "quick_start.md", *sorted((INDEX.parent / "tutorials").glob("*.md"))]
TYPED = [*TUTORIALS, INDEX.parent / "recipes.md"]
FILE = re.compile(r'(?:python|json|yaml|sh) title="(?P<name>[\w.-]+)"')
COMMANDS = "sh runnable"


def parsed_by_bash(script):
    return subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_every_block_of_a_tutorial_is_run(page):
    """None is only shown: a file is written and started by a command, and commands name what there is."""
    found = blocks(page)
    files = {match["name"]: block["body"] for block in found if (match := FILE.fullmatch(block["info"]))}
    commands = "".join(block["body"] for block in found if block["info"] == COMMANDS)
    assert commands
    assert len(files) == sum(block["info"] not in (COMMANDS, "python runnable", "text output") for block in found)
    for name, code in files.items():
        assert name in commands or any(name in other for other in files.values()), name
        read = {".py": ast.parse, ".json": json.loads, ".yaml": yaml.safe_load, ".sbatch": parsed_by_bash}
        assert read[Path(name).suffix](code)
    for command in re.findall(r"^offload (\w+)", commands, re.MULTILINE):
        assert command in cli.COMMANDS


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_is_typed(page, drives):
    """Files are written and commands typed in the order of the page; `offload doctor` may find something: status 1."""
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1"}
    for block in blocks(page):
        code = on_these(drives, block["body"])
        if match := FILE.fullmatch(block["info"]):
            Path(match["name"]).write_text(code, encoding="utf-8")
        printed = ""
        for line in code.splitlines() if block["info"] == COMMANDS else ():
            done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=environment)
            fine = (0, 1) if line.startswith("offload doctor") else (0,)
            assert done.returncode in fine, f"{line}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            printed += done.stdout
        if block["info"] == COMMANDS:
            assert_printed(page, block, printed)
