"""Style as a test: what reviewers would otherwise have to say again and again."""

import ast
import builtins
import functools
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FACE = "nvme_offload"
LAYERS = ("aio_native", "offload", "optim", "perf")
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_FUNCTION_LINES = 70
ROOMS_BOTTOM_UP = {
    "aio_native": "_native descriptor faults interrupt uring_refusal / finalizing / engine starting / bell "
    "operation / requests / injection / python_engine / aiofiles_engine null pyuring uring "
    "/ registry",
    "offload": "foreign / _torch_private devices units user_path warn / _fsdp_passes errors progress sync / host / "
    "config / storage / durable staging / shards swapper / activations weights",
    "optim": "_kernels telemetry / ranks rules / layout / kernels precision / fused / tiers / updates / state / "
    "access / birth durable / step weights / optimizer / checkpoint named_optimizers / zero / adapters",
    "perf": "measure / bench doctor plan runs / cli init top verify / report / experiments / benchmarks",
}
FOLDERS_BOTTOM_UP = {
    package: tuple({*level.split()} for level in levels.split("/")) for package, levels in ROOMS_BOTTOM_UP.items()
}
"""The rooms (folders and modules) of a package from the ground up. A room imports from lower levels only."""
TOUCHES_PRIVATE = ("_torch_private.py", "_fsdp_passes.py")
PRIVATE_TORCH = re.compile(
    r"\btorch(\.\w+)*\._[a-z]\w*|^\s*(from|import) torch(\.\w+)*\._\w+|\._version\b", re.MULTILINE
)

PUBLIC_IN_SPITE = {"_asdict", "_fields", "_make", "_replace", "_getframe", "_current_frames", "_init_weights"}
"""Of NamedTuple, sys and transformers, whose documentation offers them."""

assert len(SOURCES) > 20, "the sources were not found"


@functools.cache
def parsed(path):
    """The tree of a module, with its relative imports written from `FACE` down."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.relative_to(ROOT).parts[: -node.level]
            node.module, node.level = ".".join([FACE, *folder, *filter(None, [node.module])]), 0
            node.was_relative = True
    return tree


@functools.cache
def nodes_of(tree):
    """Return all nodes, which many rules look at."""
    return [*ast.walk(tree)]


def of_every(paths):
    """Makes one test of a rule for a file; it says of each file what is wrong there."""

    def one_test(rule):
        @functools.wraps(rule)
        def test():
            wrong = [f"{path.relative_to(ROOT)}: {said}" for path in paths if (said := said_by(rule, path))]
            assert not wrong, "\n".join(wrong)

        del test.__wrapped__  # pytest would ask for the rule's own arguments
        return test

    return one_test


def said_by(rule, path):
    try:
        rule(path)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return None


@functools.cache
def imported_modules(tree):
    """Dotted names of modules; of what is imported from a package both the package and the name in it."""
    found = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def imported_packages(tree):
    """Top-level packages; of our own the part below the one name that is installed."""
    for module in imported_modules(tree):
        first, *rest = module.split(".")
        yield rest[0] if first == FACE and rest else first


@of_every(SOURCES)
def test_imports_go_one_way(path):
    layer = LAYERS.index(path.relative_to(ROOT).parts[0])
    above = set(LAYERS[layer + 1 :]) | ({"torch"} if layer == 0 else set())
    wrong = above & set(imported_packages(parsed(path)))
    assert not wrong, f"imports {sorted(wrong)}: the arrow is {' <- '.join(LAYERS)}, and no torch in the first"


@functools.cache
def rooms_of(package):
    """Every module and folder with modules directly in `package`."""
    modules = (path for path in (ROOT / package).rglob("*.py*") if path.suffix in (".py", ".pyi"))
    files = {path.relative_to(ROOT / package).parts[0] for path in modules}
    return {Path(name).stem for name in files} - {"__init__"}


def imported_rooms(tree, package):
    """Rooms of `package` that a module imports from; `__init__` for names of the package itself."""
    prefix = f"{FACE}.{package}"
    for module in imported_modules(tree):
        if module.startswith(prefix + "."):
            room = module.removeprefix(prefix + ".").split(".")[0]
            yield room if room in rooms_of(package) else "__init__"


def level_of(room, levels):
    return next((number for number, rooms in enumerate(levels) if room in rooms), len(levels))


@pytest.mark.parametrize("package", FOLDERS_BOTTOM_UP)
def test_every_room_has_its_level(package):
    listed = [room for rooms in FOLDERS_BOTTOM_UP[package] for room in rooms]
    assert sorted(listed) == sorted(rooms_of(package))


@pytest.mark.parametrize("package", FOLDERS_BOTTOM_UP)
def test_imports_inside_a_package_go_down(package):
    levels = FOLDERS_BOTTOM_UP[package]
    wrong = []
    for path in (ROOT / package).rglob("*.py"):
        room = Path(path.relative_to(ROOT / package).parts[0]).stem
        for other in sorted(set(imported_rooms(parsed(path), package)) - {room}):
            if level_of(other, levels) >= level_of(room, levels):
                wrong.append(f"{path.relative_to(ROOT)} imports {other}, which does not lie below {room}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", LAYERS)
def test_modules_go_in_no_circle(package):
    """Not inside a room either."""
    modules = {
        f"{FACE}.{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}": path
        for path in (ROOT / package).rglob("*.py")
    }
    imports = {name: set(imported_modules(parsed(path))) & modules.keys() for name, path in modules.items()}
    while free := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in free:
            del imports[name]
    assert not imports, f"modules that import each other, or one that does: {sorted(imports)}"


ASKS_DRIVES = ROOT / "offload" / "storage" / "drive.py"
ON_DRIVES = [path for room in ("storage", "durable") for path in (ROOT / "offload" / room).rglob("*.py")]
NO_IO = re.compile(r"os\.(getpid|geteuid|strerror|fspath|environ\.get|path\.samestat)$")
IO = re.compile(
    r"os\.|fcntl\.|shutil\.|(open|Descriptor|sync_file|sync_data|sync_folder|make_folder)$|.*\.(chmod|exists|glob|is_dir|"
    r"is_file|is_symlink|iterdir|lstat|mkdir|read_bytes|read_text|rename|rmdir|stat|touch|unlink|write_\w+)$"
)


@of_every([path for path in ON_DRIVES if path != ASKS_DRIVES])
def test_system_calls_about_drives_go_one_way(path):
    """They are asked for, so that each error names its place; see `offload.storage.drive`."""
    calls = [(node.lineno, ast.unparse(node.func)) for node in nodes_of(parsed(path)) if isinstance(node, ast.Call)]
    wrong = [f"line {line}: {call}" for line, call in calls if IO.match(call) and not NO_IO.match(call)]
    assert not wrong, f"{', '.join(wrong)}: write drive.ask(path, ...)"


MAX_MODULES_OF_A_STEP = 62


def test_a_step_rests_on_few_modules():
    """It asks `optim.state.asked`, and not the section, the tiers of blocks or a run themselves."""
    imports = {
        f"{FACE}.{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}": set(
            imported_modules(parsed(path))
        )
        for path in SOURCES
    }
    reached, new = set(), {f"{FACE}.optim.step.stepper"}
    while new:
        reached |= new
        new = {name for module in new for name in imports[module] & imports.keys()} - reached
    assert len(reached) <= MAX_MODULES_OF_A_STEP, f"{len(reached)}: hand in a Protocol"


def private_attributes_of_others(tree):
    """Names of attributes with an underscore that are taken of anything but self, and are not this module's own."""
    attributes = [node for node in nodes_of(tree) if isinstance(node, ast.Attribute)]
    own = {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and is_self(node.value)}
    own |= {node.name for node in nodes_of(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.id for node in nodes_of(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in attributes:
        private = node.attr.startswith("_") and not node.attr.endswith("__") and node.attr not in PUBLIC_IN_SPITE
        if private and not is_self(node.value) and node.attr not in own:
            yield f"{ast.unparse(node.value)}.{node.attr}"


def is_self(node):
    called = node.func if isinstance(node, ast.Call) else node
    return isinstance(called, ast.Name) and called.id in ("self", "cls", "super")


def test_nothing_is_imported_for_its_type_alone():
    names = {
        path: {getattr(node, key, "") for node in nodes_of(parsed(path)) for key in ("id", "attr")} for path in SOURCES
    }
    found = [str(path.relative_to(ROOT)) for path, used in names.items() if "TYPE_CHECKING" in used]
    assert not found, f"{found}: hand in a Protocol or a callable, or move what both need to the ground"


def test_nobody_reaches_into_another():
    found = {
        str(path.relative_to(ROOT)): places
        for path in SOURCES
        if path.name not in TOUCHES_PRIVATE and (places := set(private_attributes_of_others(parsed(path))))
    }
    assert not found, f"give what is needed a public name: {found}"


@of_every(SOURCES)
def test_no_print_and_no_call_inside_assert(path):
    for node in nodes_of(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"line {node.lineno}: print; use rich or logging"
        if isinstance(node, ast.Assert):
            called = {ast.unparse(call.func) for call in ast.walk(node.test) if isinstance(call, ast.Call)}
            assert called <= {"isinstance", "len", "all", "any"}, (
                f"line {node.lineno}: acts inside an assert, which python -O leaves out"
            )


@of_every(SOURCES)
def test_functions_fit_on_a_screen(path):
    for node in nodes_of(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"line {node.lineno}: {node.name} has {lines} lines; split it"


@of_every(SOURCES)
def test_private_torch_names_have_one_place(path):
    if path.name in TOUCHES_PRIVATE:
        return
    found = PRIVATE_TORCH.search(path.read_text(encoding="utf-8"))
    assert not found, f"{found and found.group().strip()} belongs in offload/{' or '.join(TOUCHES_PRIVATE)}"


@of_every([*SOURCES, *TESTS])
def test_one_name_is_imported(path):
    """The folders are no packages of their own: a user's `optim.py` or `perf/` must not hide them, nor they it."""
    wrong = {module for module in imported_modules(parsed(path)) if module.split(".")[0] in LAYERS}
    assert not wrong, f"imports {sorted(wrong)}: write {FACE}.{min(wrong)}"


BENCHMARKS = ROOT / "perf" / "benchmarks"


@of_every([*SOURCES, *TESTS])
def test_imports_are_relative_inside_a_top_level_folder_alone(path):
    """A reader, or a tool, that goes by paths sees the arrows inside a folder; between folders the name is whole."""
    folder = f"{FACE}.{path.relative_to(ROOT).parts[0]}"
    if path.is_relative_to(BENCHMARKS):  # pytest imports these by their path, under another name
        folder = BENCHMARKS.name
    for node in nodes_of(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            inside = f"{node.module}.".startswith(folder + ".")
            assert inside == hasattr(node, "was_relative"), f"line {node.lineno}: imports {node.module}"


def test_every_top_level_folder_has_its_link():
    links = {path.name: path.resolve() for path in (ROOT / "src" / FACE).iterdir() if path.is_symlink()}
    assert links == {layer: ROOT / layer for layer in LAYERS}


@of_every(SOURCES)
def test_what_must_last_goes_through_one_door(path):
    found = re.findall(r"\b(?:fsync|fdatasync|O_D?SYNC)\b", path.read_text(encoding="utf-8"))
    assert not found or path.name == "sync.py", f"{found[0]} belongs in offload/sync.py"


TAKING = re.compile(r"(?<!b)lock|acquire|\blease|hold|held|enter_context|kept_away|at_rest|Descriptor")
"""What takes a lock, a lease or a buffer is called so, in our packages as in the standard library."""


def kept_by_generators(tree):
    """Of context managers that are generators: what they take, and what they undo after an exception of any kind."""
    for manager in nodes_of(tree):
        decorators = getattr(manager, "decorator_list", ())
        if not any(ast.unparse(decorator).endswith("contextmanager") for decorator in decorators):
            continue
        for node in ast.walk(manager):
            taking = [node.func] if isinstance(node, ast.Call) else []
            taking += [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
            yield from (f"line {node.lineno}: {ast.unparse(it)}" for it in taking if TAKING.search(ast.unparse(it)))
            if isinstance(node, ast.ExceptHandler) and (node.type is None or "Base" in ast.unparse(node.type)):
                yield f"line {node.lineno}: except {ast.unparse(node.type) if node.type else ''}"


@of_every(SOURCES)
def test_what_a_generator_has_is_nothing_that_can_be_lost(path):
    """A signal handler that raises in contextlib leaves the generator where it is, with all that it holds, until the
    exception is forgotten; and then an `except BaseException` in it undoes what others have done since."""
    if path.relative_to(ROOT).parts[0] != "perf":
        found = list(kept_by_generators(parsed(path)))
        assert not found, f"{found}: write a class, whose __enter__ takes it last"


def device_names(tree):
    """Kinds of devices that are named in code: ``torch.cuda``, ``.is_cuda``, "cuda" where it is no docstring."""
    texts = {id(node.value) for node in nodes_of(tree) if isinstance(node, ast.Expr)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and "cuda" in node.attr.lower() and not node.attr.startswith("cudaHost"):
            yield f"line {node.lineno}: .{node.attr}"
        if isinstance(node, ast.Constant) and node.value in ("cuda", "nccl") and id(node) not in texts:
            yield f"line {node.lineno}: {node.value!r}"


@of_every(SOURCES)
def test_kinds_of_devices_are_named_in_one_room(path):
    """The command alone, which asks for one and tells of it, may name them, too."""
    package, room = path.relative_to(ROOT).parts[:2]
    if package != "perf" and (package, room) != ("offload", "devices"):
        found = list(device_names(parsed(path)))
        assert not found, f"{found}: hand a torch.device to offload/devices"


MADE_SOMEWHERE = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "nested_tensor", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
"""Functions of torch that make a tensor on the default device, which users set."""


def without_device(tree):
    for node in nodes_of(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        makes = ast.unparse(node.func.value) == "torch" and node.func.attr in MADE_SOMEWHERE
        if makes and not any(keyword.arg == "device" for keyword in node.keywords):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@of_every(SOURCES)
def test_tensors_are_made_on_a_device_that_is_named(path):
    if path.relative_to(ROOT).parts[0] != "perf":
        found = list(without_device(parsed(path)))
        assert not found, f"{found}: say device=, or it is where torch.set_default_device says"


@functools.cache
def with_tensors():
    return [
        parsed(path)
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] in ("offload", "optim") and path.name not in TOUCHES_PRIVATE
    ]


MAX_ATTRIBUTES = 12
MANY_ATTRIBUTES = {
    "ExtentRing": 16,
    "Meter": 20,
    "OffloadConfig": 24,
    "OffloadEngine": 15,
    "OptimizerParams": 13,
    "OptimizerStats": 52,
    "OwnerThread": 18,
    "ParamRecord": 13,
}
"""Classes that are to become several, with the attributes that they have; none may get more."""
MAX_WRITES_TO_OTHERS = 58
MAX_TESTS_BELOW_THE_FACE = 90
HEADLESS = {"how", "of", "those", "what", "where", "whose"}
"""Words that no docstring begins with: its first sentence has a subject and a verb, or is an imperative."""


def classes(trees=None):
    trees = map(parsed, SOURCES) if trees is None else trees
    return [node for tree in trees for node in nodes_of(tree) if isinstance(node, ast.ClassDef)]


def writes_to_others(trees):
    """Attributes that code assigns of anything but self."""
    nodes = [node for tree in trees for node in nodes_of(tree) if isinstance(node, ast.Attribute)]
    return [node for node in nodes if isinstance(node.ctx, ast.Store) and not is_self(node.value)]


def typed_attributes(kind, names):
    """Attributes that a class declares, in its body or of self, with one of these names in their annotation."""
    for node in ast.walk(kind):
        declared = isinstance(node, ast.AnnAssign) and (isinstance(node.target, ast.Attribute) or node in kind.body)
        if declared and names & {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}:
            yield node.target.attr if isinstance(node.target, ast.Attribute) else node.target.id


def attributes(kind):
    stored = [node for node in ast.walk(kind) if isinstance(getattr(node, "ctx", None), ast.Store)]
    own = {node.attr for node in stored if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    fields = [node for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return own | {node.target.id for node in fields if "ClassVar" not in ast.unparse(node.annotation)}


def test_others_are_told_and_not_written_to():
    found = writes_to_others(with_tensors())
    assert len(found) <= MAX_WRITES_TO_OTHERS, f"{len(found)} assignments to others' attributes: call a method"


def test_a_state_of_an_enum_changes_in_its_class():
    enums = {kind.name for kind in classes(with_tensors()) if any("Enum" in ast.unparse(base) for base in kind.bases)}
    fields = {name for kind in classes(with_tensors()) for name in typed_attributes(kind, enums)}
    assert {"Residency", "TensorResidency"} <= enums
    assert "residency" in fields
    found = [ast.unparse(node) for node in writes_to_others(with_tensors()) if node.attr in fields]
    assert not found, f"{found}: give the class a table of transitions and one method that makes them"


def changes_of_state(tree):
    """(enum, member, Class.method) of each call of become() that names a member; (None, None, ...) of any other."""
    for kind in [node for node in nodes_of(tree) if isinstance(node, ast.ClassDef)]:
        for method in (node for node in kind.body if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(method) if isinstance(node, ast.Call)):
                if getattr(call.func, "attr", "").lstrip("_") == "become":
                    given = [each for arg in call.args for each in branches(arg)]
                    members = [(node.value.id, node.attr) for node in given if getattr(node, "attr", "").isupper()]
                    yield from ((*member, f"{kind.name}.{method.name}") for member in members or [(None, None)])


def branches(value):
    return (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)


def state_tables():
    """Enum, old and new of each change that a table allows, and the rows under it: STATE -> STATE [who does it]."""
    for table, text in (pair for path in SOURCES for pair in pairwise(parsed(path).body)):
        if isinstance(table, ast.Assign) and ast.unparse(table.targets[0]) == "_MAY_FOLLOW":
            follow = zip(table.value.keys, table.value.values, strict=True)
            allowed = {(old.attr, new.attr) for old, those in follow for new in getattr(those, "elts", ())}
            rows = re.findall(r"^(\w+) -> (\w+) \[(.+?)\]", text.value.value, re.MULTILINE)
            yield table.value.keys[0].value.id, allowed, rows


def test_each_change_of_a_state_is_named_under_its_table():
    done = {change for path in SOURCES for change in changes_of_state(parsed(path))}
    tables = [*state_tables()]
    assert {enum for enum, _, _ in tables} >= {member.split(".")[0] for member, _, _ in done if member}
    for enum, allowed, rows in tables:
        assert {(old, new) for old, new, _ in rows} == allowed
        named = {(new, doer) for _, new, those in rows for doer in those.split(", ")}
        assert {doer for _, doer in named} <= {doer for _, _, doer in done}
        assert {(member, doer) for its, member, doer in done if its == enum} <= named


def test_callbacks_are_handed_to_constructors():
    aliases = {
        node.targets[0].id
        for tree in with_tensors()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable[")
    }
    declared = {name for kind in classes(with_tensors()) for name in typed_attributes(kind, aliases | {"Callable"})}
    found = {node.attr for node in writes_to_others(with_tensors())} & declared
    assert not found, f"assigned after construction: {sorted(found)}; take them as arguments"


def test_classes_have_few_attributes():
    found = {kind.name: len(attributes(kind)) for kind in classes()}
    wrong = {name: number for name, number in found.items() if number > MANY_ATTRIBUTES.get(name, MAX_ATTRIBUTES)}
    assert not wrong, f"{wrong}: at most {MAX_ATTRIBUTES}; make two classes"
    assert not (done := MANY_ATTRIBUTES.keys() - found.keys()), f"take out of the list what is done: {done}"


def test_there_is_no_mixin():
    """A class has one base of ours, or is a Protocol; an error may be one of Python's besides."""
    own = {kind.name for kind in classes()}
    found = [
        kind.name
        for kind in classes()
        if len(kind.bases) > 1
        and own & {ast.unparse(base).partition("[")[0] for base in kind.bases}
        and "Protocol" not in map(ast.unparse, kind.bases)
        and not all(hasattr(builtins, ast.unparse(base)) for base in kind.bases[1:])
    ]
    assert not found, f"{found}: hold an object instead of inheriting its methods"


def test_a_class_name_occurs_once():
    wrong = [name for name, count in Counter(kind.name for kind in classes()).items() if count > 1]
    assert not wrong, f"{sorted(wrong)}: another class has this name; say which of the two it is"


def test_tests_use_the_face():
    """But for those of the engines and of the command, and what no public name reaches."""
    own = [path for path in TESTS if path.relative_to(ROOT).parts[1] not in ("aio_native", "perf")]
    below = [path for path in own if {*imported_packages(parsed(path))} & {*LAYERS}]
    assert len(below) <= MAX_TESTS_BELOW_THE_FACE, f"{len(below)} files import from inner modules: use public names"


def docstrings(tree):
    """Texts of modules, classes and functions, and those under attributes."""
    for node in nodes_of(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        for above, below in pairwise(body if isinstance(body, list) else []):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
            if isinstance(above, ast.Assign | ast.AnnAssign) and isinstance(text, str):
                yield text


def test_docstrings_begin_with_a_sentence():
    words = Counter(
        text.split()[0].rstrip(",").lower() for tree in map(parsed, SOURCES) for text in docstrings(tree) if text
    )
    wrong = {word: words[word] for word in HEADLESS & words.keys()}
    assert not wrong, f"{wrong}: begin with a subject and a verb, or an imperative"


def test_imports_are_free():
    """No ring, thread or CUDA context; the face and aio_native without torch, the command too."""
    code = """
import sys, threading, os
import nvme_offload, nvme_offload.aio_native
assert "torch" not in sys.modules
import nvme_offload.perf.plan.command
assert "sympy" not in sys.modules, "a third of torch's time"
for name in [name for name in sys.modules if name.startswith("nvme_offload.perf")]:
    del sys.modules[name]
import torch
with_torch = len(os.listdir("/proc/self/task"))
for name in nvme_offload.__all__:
    getattr(nvme_offload, name)
assert not [name for name in sys.modules if name.startswith('nvme_offload.perf')], "the arrow"
import nvme_offload.perf.cli
assert len(os.listdir("/proc/self/task")) == with_torch, "a thread was started"
assert not [fd for fd in os.listdir("/proc/self/fd") if "io_uring" in (os.readlink("/proc/self/fd/" + fd)
            if os.path.lexists("/proc/self/fd/" + fd) else "")]
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
