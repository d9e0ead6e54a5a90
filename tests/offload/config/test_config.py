import errno
import json
import pickle
import re
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nvme_offload import (
    CheckpointError,
    CheckpointWriteError,
    ClosedError,
    ConfigError,
    ConfigWarning,
    CorruptionError,
    ForkError,
    OffloadConfig,
    OffloadError,
    OutOfSpaceError,
    StateError,
    SwapIOError,
    TensorSwapper,
)
from nvme_offload.offload.config.keys import sections
from nvme_offload.offload.config.section import AioConfig
from nvme_offload.offload.units import GiB
from scripts import configuration_page
from tests.offload.config.test_config_engine import BAD_OF_ENGINE
from tests.offload.config.test_deepspeed_sections import ALL_KEYS

DOCS = Path(__file__).parents[3] / "docs"
OPTIMIZER = "zero_optimization.offload_optimizer"


def optimizer(**keys):
    return {"zero_optimization": {"offload_optimizer": keys}}


def nvme(**keys):
    return optimizer(device="nvme", nvme_path="/nvme", **keys)


# A bad section, the line that says so must start with the second, and holds the third.
BAD = [
    # unknown keys: misspelled, in the wrong section, of no use
    ({"aios": {}}, "aios = {}", "nearest known key is aio"),
    ({"aio": {"queue_dept": 8}}, "aio.queue_dept = 8", "nearest known key is aio.queue_depth"),
    (optimizer(nvme_paths="/nvme"), f'{OPTIMIZER}.nvme_paths = "/nvme"', f"key is {OPTIMIZER}.nvme_path"),
    ({"queue_depth": 8}, "queue_depth = 8", "queue_depth belongs in aio; write aio.queue_depth"),
    ({"aio": {"nvme_path": "/nvme"}}, 'aio.nvme_path = "/nvme"', f"belongs in {OPTIMIZER}"),
    ({"offload_optimizer": {}}, "offload_optimizer = {}", "write zero_optimization.offload_optimizer"),
    ({"optimizer": {"params": {"learning_rate": 1}}}, "optimizer.params.learning_rate = 1", "write lr"),
    ({"aio": {"xyzzy": 1}}, "aio.xyzzy = 1", "known keys here are engine, block_size, queue_depth"),
    ({"aio": {7: 1}}, "aio.7 = 1", "unknown key"),
    # sections that are none
    ({"aio": []}, "aio = []", "is not a section"), ([], "the whole = []", "is not a section"),
    # ranges and types
    ({"gradient_clipping": -1}, "gradient_clipping = -1", "a number, 0 or more (default 0.0)"),
    ({"aio": {"engine": "libaio"}}, 'aio.engine = "libaio"', "'auto', 'io_uring', 'pyuring' or 'aiofiles'"),
    ({"aio": {"queue_depth": 0}}, "aio.queue_depth = 0", "a whole number, 1..4096 (default 32)"),
    ({"aio": {"queue_depth": True}}, "aio.queue_depth = true", "a whole number, 1..4096"),
    ({"aio": {"rings": float("nan")}}, "aio.rings = NaN", "a whole number, 1..64 (default 1)"),
    ({"aio": {"rings": 1, "intra_op_parallelism": 2}}, "aio.intra_op_parallelism = 2", "aio.rings = 1"),
    ({"aio": {"block_size": 1000}}, "aio.block_size = 1000", "a multiple of 4 KiB"),
    ({"aio": {"block_size": "1M"}}, 'aio.block_size = "1M"', '"512MiB", "8GiB", "1.5GB"'),
    ({"aio": {"direct": True}}, "aio.direct = true", "'required', 'optional' or 'disabled'"),
    ({"aio": {"checksums": 1}}, "aio.checksums = 1", "true or false (default false)"),
    ({"aio": {"path_weights": [1, 0]}}, "aio.path_weights[1] = 0", "a list of positive numbers"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4", "a whole number, 0..3 (default 0)"),
    (nvme(staging_budget=100), f"{OPTIMIZER}.staging_budget = 100", "8 KiB or more"),
    (nvme(wear_limit="1TB"), f'{OPTIMIZER}.wear_limit = "1TB"', 'write bytes a day: "1TB/day"'),
    (nvme(wear_limit=5), f"{OPTIMIZER}.wear_limit = 5", "is no limit of wear"),
    (optimizer(device="nvme", nvme_path=7), f"{OPTIMIZER}.nvme_path = 7", "a path or a list of"),
    (optimizer(device="nvme", nvme_path=""), f'{OPTIMIZER}.nvme_path = ""', "a path or a list of"),
    (optimizer(device="nvme", nvme_path=["/a", ""]), f"{OPTIMIZER}.nvme_path = ", "neither a path nor"),
    (optimizer(device="nvme", nvme_path=["/a", "/a/"]), f"{OPTIMIZER}.nvme_path = ", "names one path twice"),
    # contradictions name both keys
    ({"overlap_step": "backward"}, "overlap_step", "skip_non_finite = false"),
    ({"overlap_step": "backward", "skip_non_finite": False, "gradient_clipping": 1.0}, "overlap_step", "= 0, or write"),
    ({"skip_non_finite": False, "fp16": {"enabled": True}}, "skip_non_finite = false", "leave it out"),
    (optimizer(device="nvme"), f"{OPTIMIZER}.nvme_path = missing", 'device = "nvme" needs it'),
    (nvme(buffer_count=64, staging_budget="64KiB"), f"{OPTIMIZER}.staging_budget", "buffer_count = 64"),
    (nvme() | {"aio": {"path_weights": [1, 2]}}, "aio.path_weights = [1, 2]", f"{OPTIMIZER}.nvme_path has 1"),
    # DeepSpeed's keys that ask for something else
    (nvme(super_offload=True), f"{OPTIMIZER}.super_offload = true", "leave it out"),
    ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}},
     "zero_optimization.offload_optimizer", "zero_optimization.cpu_offload"),
    ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_optimization.zero_hpz", "write 1 or leave"),
]  # fmt: skip
EVERY_BAD = [*BAD, *BAD_OF_ENGINE]


@pytest.mark.parametrize(("data", "start", "text"), EVERY_BAD, ids=[row[1] for row in EVERY_BAD])
def test_bad_section_is_named_with_its_remedy(data, start, text):
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict(data)
    lines = [line for line in caught.value.problems if line.startswith(start)]
    assert len(lines) == 1
    assert text in lines[0]
    assert len(caught.value.problems) == 1, "one mistake, one problem"


def test_all_problems_are_told_at_once():
    data = nvme(buffer_count=0) | {"aio": {"queue_dept": 1, "rings": 0}, "gradient_clipping": -1}
    with pytest.raises(ConfigError, match="config: 4 problems\n  ") as caught:
        OffloadConfig.from_dict(data)
    keys = {line.split(" = ")[0] for line in caught.value.problems}
    assert keys == {"aio.queue_dept", "aio.rings", "gradient_clipping", f"{OPTIMIZER}.buffer_count"}
    assert isinstance(caught.value, ValueError)


def test_a_long_value_is_shortened():
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict({"aio": {"xyzzy": {"key": "x" * 1000}}})
    assert "x" * 60 not in str(caught.value)


OF_MODELS = [(*model.model_fields, *model.IGNORED, *model.ONLY) for _, model in sections(OffloadConfig)]
NAMES = sorted({name for names in OF_MODELS for name in names})
WORDS = st.text(max_size=5) | st.sampled_from(["auto", "1MiB"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS
KEYS = st.sampled_from([*NAMES, "x", 1])
JUNK = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=12)


@settings(max_examples=50)
@given(JUNK)
def test_anything_else_is_a_config_error(data):
    with warnings.catch_warnings(action="ignore"), suppress(ConfigError):
        OffloadConfig.from_dict(data)


# The NVMe section of DeepSpeed's and Hugging Face's documentation, numbers resolved.
ZERO_INFINITY = json.loads("""{
    "zero_optimization": {
        "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
        "offload_optimizer": {
            "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 4, "fast_init": false,
            "pipeline_read": false, "pipeline_write": false, "ratio": 1.0
        },
        "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true, "round_robin_gradients": true
    },
    "aio": {
        "block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 4, "thread_count": 1, "single_submit": false,
        "overlap_events": true, "use_gds": false
    },
    "gradient_clipping": 1.0, "steps_per_print": 2000, "wall_clock_breakdown": false,
    "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false
}""")


def test_deepspeed_section_is_read_with_one_warning_that_says_why():
    before = json.dumps(ZERO_INFINITY)
    with pytest.warns(ConfigWarning) as caught:
        config = OffloadConfig.from_dict(ZERO_INFINITY)
    assert json.dumps(ZERO_INFINITY) == before
    assert len(caught) == 1
    assert caught[0].filename == __file__
    lines = str(caught[0].message).splitlines()
    assert lines[0] == "config: accepted, but without effect here:"
    assert len(lines) == 1 + 3 + 4 + 5 + 9  # the top level, aio, offload_optimizer, zero_optimization
    assert "  aio.single_submit = false: requests are always submitted in batches" in lines
    assert all(re.fullmatch(r"  \S+ = \S+: .{10,}", line) for line in lines[1:])

    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.sub_group_size == 10**9
    assert type(config.zero_optimization.sub_group_size) is int
    assert config.zero_optimization.offload_optimizer.pin_memory is True
    assert config.nvme_paths == (Path("/local_nvme"),)
    assert (config.aio.block_size, config.aio.queue_depth, config.aio.rings) == (262144, 32, 4)
    assert config.gradient_clipping == 1.0


@pytest.mark.parametrize("data", [
    {"steps_per_print": 10}, {"aio": {"thread_count": 1}}, {"zero_optimization": {"overlap_comm": True}},
    {"amp": {"enabled": False}}, {"bfloat16": {"enabled": True}}, {"aio": {"intra_op_parallelism": 2}},
    {"deepspeed": {"zero_optimization": {"stage": 1}}},
], ids=lambda data: next(iter(data)))  # fmt: skip
def test_a_section_for_deepspeed_without_clipping_is_told_what_that_means(data):
    with pytest.warns(ConfigWarning, match=r"gradient_clipping: DeepSpeed clips at 1\.0 .*; write 1\.0, or") as caught:
        assert OffloadConfig.from_dict(data).gradient_clipping == 0.0
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_other_sections_are_told_nothing_about_clipping(recwarn):
    OffloadConfig.from_dict({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "aio": {"queue_depth": 8}})
    assert not recwarn.list
    warnings.simplefilter("always")
    for clipping in (0.0, 1.0):
        OffloadConfig.from_dict({"steps_per_print": 10, "gradient_clipping": clipping})
    assert len(recwarn) == 2
    assert not any("left out, which" in str(warning.message) for warning in recwarn)


def test_the_warning_is_said_once(recwarn):
    warnings.simplefilter("default")  # pytest shows every occurrence; Python shows the first
    for _ in range(3):
        OffloadConfig.from_dict({"steps_per_print": 10})
    assert len(recwarn) == 1


def test_paths_are_a_tuple_and_know_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for paths in (["~/a", "/b"], ("~/a", "/b"), [Path("~/a"), Path("/b")]):
        config = OffloadConfig.from_dict(optimizer(device="nvme", nvme_path=paths))
        assert config.nvme_paths == (Path("/home/someone/a"), Path("/b"))
    assert OffloadConfig.from_dict(optimizer(device="nvme", nvme_path=Path("/b"))).nvme_paths == (Path("/b"),)


def test_models_are_frozen_hashable_and_strict():
    config = OffloadConfig.from_dict(nvme())
    with pytest.raises(ValidationError):
        config.aio.queue_depth = 1
    assert hash(config) == hash(OffloadConfig.from_dict(nvme()))
    with pytest.raises(ValueError, match="queue_depth"):
        AioConfig(queue_depth=0)
    with pytest.raises(ValueError, match="nvme_path: device"):
        OffloadConfig(zero_optimization={"offload_optimizer": {"device": "nvme"}})
    with pytest.raises(ValueError, match=r"fp16\.enabled: bf16\.enabled = true beside it"):
        OffloadConfig(bf16={"enabled": True}, fp16={"enabled": True})


TOML = """
gradient_clipping = 0.5
[zero_optimization]
sub_group_size = 1e6
[zero_optimization.offload_optimizer]
device = "nvme"
nvme_path = ["/a", "/b"]
staging_budget = "1.5GiB"
[aio]
block_size = "512KiB"
direct = "optional"
checksums = true
path_weights = [2, 1]
"""


def test_toml_yaml_and_json_say_the_same(tmp_path):
    toml, as_json = tmp_path / "offload.toml", tmp_path / "offload.json"
    toml.write_text(TOML)
    config = OffloadConfig.from_file(toml)
    assert config.zero_optimization.offload_optimizer.staging_budget == 3 * GiB // 2
    assert config.aio.path_weights == (2.0, 1.0)
    yaml = tmp_path / "offload.yaml"
    yaml.write_text("overlap_step: off\noptimizer: {type: AdamW, params: {lr: 1e-4, betas: [0.9, 0.95]}}\n")
    found = OffloadConfig.from_file(yaml)
    params = found.optimizer.params
    assert (found.overlap_step, params.lr, params.betas) == ("off", 1e-4, (0.9, 0.95))
    as_json.write_text("\ufeff" + config.model_dump_json(), encoding="utf-8")  # with a byte order mark
    assert OffloadConfig.from_file(str(as_json)) == config


@pytest.mark.parametrize(("name", "text", "pattern"), [
    ("a.json", '{"aio": {\n  "rings": 1,}}', r"a\.json: line 2, column 1[34]: .*; write valid JSON"),
    ("a.json", '{"aio": {"rings": 1, "rings": 2}}', r"a\.json: rings stands twice"),
    ("a.json", "[1]", r"a\.json: the whole = \[1\]: is not a section"),
    ("a.json", '{"aio": {"ring": 1}}', r"a\.json: aio\.ring = 1: .* aio\.rings"),
    ("a.toml", "[aio]\nrings = = 1\n", r"a\.toml: .*line 2, column 9"),
    ("a.toml", "[aio]\nrings = 1\nrings = 2\n", r"a\.toml: .*line 3"),
    ("a.ini", "", r'a\.ini: the suffix is "\.ini", and a section is a file of JSON, TOML or YAML'),
    ("a.yaml", "compute_environment: LOCAL_MACHINE", r"a\.yaml: .* accelerate.* deepspeed_config_file"),
    ("a.yaml", "aio:\n  rings: 1\n  rings: 2\n", r"a\.yaml: line 2: rings stands twice"),
    ("a.yaml", "aio:\n\trings: 1\n", r"a\.yaml: line 2, column 1: found character"),
    ("a.yaml", "aio: &a {rings: 1}\nbf16: *a\n", r"a\.yaml: line 2, column 7: an alias"),
    ("a.yaml", "a: !!python/name:os.system\n", r"a\.yaml: line 1, column 4: could not determine a constructor"),
    ("a.json", b"\xff\xfe\xfa", r"a\.json: .*utf-8"),
    # what Python itself stumbles over
    ("deep.json", "[" * 200_000, "deep.json: .*nested too deeply"),
    ("deep.toml", "a = " + "[" * 100_000, "deep.toml: .*nested too deeply"),
    ("digits.json", '{"gradient_clipping": ' + "9" * 5000 + "}", "digits.json: .*5000 digits"),
    ("digits.toml", "gradient_clipping = " + "9" * 5000, "digits.toml: .*5000 digits"),
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_bad_file_names_file_and_place(tmp_path, name, text, pattern):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=pattern):
        OffloadConfig.from_file(path)


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"offload init.*absent\.json"):
        OffloadConfig.from_file(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="absent: there is no such folder; make it on a drive"):
        OffloadConfig.of(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no section was given; pass an OffloadConfig"):
        TensorSwapper()


def test_a_folder_stands_for_state_on_that_drive(tmp_path):
    config = OffloadConfig.of(str(tmp_path))
    written = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    assert config == OffloadConfig.of({**written, "offload": "auto"})
    clipped = OffloadConfig.of({**written, "offload": "auto", "gradient_clipping": 1.0})
    assert OffloadConfig.on_drive(tmp_path, gradient_clipping=1.0) == clipped


def test_committed_page_and_schema_are_the_generated_ones():
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == configuration_page.page(), "run python -m scripts.configuration_page > docs/configuration.md"
    schema = json.loads((DOCS / "configuration.schema.json").read_text(encoding="utf-8"))
    made = json.loads(json.dumps(configuration_page.json_schema()))
    assert schema == made, "the same with --schema > docs/configuration.schema.json"


def test_page_lists_every_key():
    """The page has our keys and DeepSpeed's."""
    prefix, listed = "", []
    for line in configuration_page.page().splitlines():
        if line.startswith("## "):
            prefix = f"{line[4:-1]}." if line.startswith("## `") else ""
        elif line.startswith("| `"):
            listed += [prefix + name.split(": ")[0] for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    tables = [(*m.model_fields, *m.IGNORED, *m.ONLY, *m.REFUSED) for _, m in sections(OffloadConfig)]
    keys = [prefix + name for (prefix, _), names in zip(sections(OffloadConfig), tables, strict=True) for name in names]
    assert {*keys, *ALL_KEYS} <= set(listed)


def test_examples_on_the_page_are_accepted_and_equal(tmp_path):
    json_text = re.search("```json\n(.*?)```", configuration_page.page(), re.DOTALL)[1]
    toml_text = re.search("```toml\n(.*?)```", configuration_page.page(), re.DOTALL)[1]
    (tmp_path / "a.json").write_text(json_text)
    (tmp_path / "a.toml").write_text(toml_text)
    config = OffloadConfig.from_file(tmp_path / "a.json")
    assert config == OffloadConfig.from_file(tmp_path / "a.toml") != OffloadConfig()


FIELDS = [(prefix, model, name) for prefix, model in sections(OffloadConfig) for name in model.model_fields]


@pytest.mark.parametrize(("prefix", "model", "name"), FIELDS, ids=[row[0] + row[2] for row in FIELDS])
def test_every_key_is_described_and_its_range_is_told_the_same_way(prefix, model, name):
    field = model.model_fields[name]
    assert field.description
    entry = configuration_page.plain(model.model_json_schema()["properties"][name])
    if "$ref" in entry or "enum" in entry:
        return
    bounds = configuration_page.bounds(entry)
    assert bounds or entry["type"] not in ("integer", "number"), "a number has a range"
    assert bounds in entry["x-write"]
    assert bounds in " ".join(field.description.split())


def test_no_key_stands_in_two_tables():
    for _, model in sections(OffloadConfig):
        tables = (model.model_fields, model.SPELLINGS, model.IGNORED, model.ONLY, model.REFUSED)
        keys = [key for table in tables for key in table]
        assert len(keys) == len(set(keys))
        assert set(model.SPELLINGS.values()) <= set(model.model_fields)


WHERE = {"path": "/nvme/swap", "offset": 4096, "size_bytes": 8192, "direction": "write", "extent": "layer.0"}
ERRORS = [
    ConfigError(["aio.rings = 0: wrong"], "a.json"),
    SwapIOError(errno.EIO, **WHERE),
    OutOfSpaceError(path="/nvme/swap", needed_bytes=4 * GiB, free_bytes=3 * GiB),
    ClosedError("TensorSwapper"),
    ForkError("TensorSwapper", 1, 2),
    StateError("layer.0", expected="on_nvme", actual="in_flight"),
    CorruptionError("/nvme/swap", "layer.0", 1, 2),
    CheckpointWriteError(errno.ENOSPC, "/checkpoints/a.partial", "needed 2 GiB, free 1 GiB"),
    CheckpointError("/checkpoints/a/state.json", "is missing"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error):
    error.add_note("seen by rank 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


@pytest.mark.parametrize(("code", "remedy"), [
    (errno.ENOSPC, "free space"), (errno.EDQUOT, "have it raised"), (errno.EIO, "dmesg"),
    (errno.EINVAL, 'aio.direct to "optional"'), (errno.ENODATA, "truncated it"), (errno.EROFS, "remount"),
    (errno.EACCES, "permission"), (errno.EFBIG, "ulimit -f"), (errno.ENODEV, "another file system"),
    (errno.EPERM, "as /proc and /sys"),
])  # fmt: skip
def test_io_error_names_everything(code, remedy):
    error = SwapIOError(code, **WHERE)
    assert isinstance(error, OSError)
    assert (error.errno, error.filename, error.path) == (code, "/nvme/swap", Path("/nvme/swap"))
    expected = f"write of 8192 bytes at offset 4096 of /nvme/swap (layer.0) failed: {errno.errorcode[code]}, "
    assert str(error).startswith(expected)
    assert remedy in str(error)


def test_out_of_space_says_needed_and_free():
    error = OutOfSpaceError(path="/nvme/swap", needed_bytes=4 * GiB, free_bytes=3 * GiB)
    assert isinstance(error, SwapIOError)
    assert error.errno == errno.ENOSPC
    assert str(error).endswith("needed 4 GiB, free 3 GiB (4294967296 and 3221225472 bytes)")


@pytest.mark.parametrize(("code", "is_said"), [(errno.ENOSPC, True), (errno.EDQUOT, False)])
def test_out_of_space_that_seems_to_be_enough_says_what_else_needs_blocks(code, is_said):
    """ext4 and XFS reserve less than statvfs calls free (findings/free_space_cannot_be_reserved.sh)."""
    error = OutOfSpaceError(path="/nvme/swap", needed_bytes=GiB, free_bytes=GiB, errno=code)
    assert str(error).endswith("the map of the file needs blocks, too") is is_said


def test_a_limit_of_the_process_is_not_taken_for_one_of_the_folder():
    assert str(CheckpointWriteError(errno.EMFILE, "/checkpoints")).endswith("has about seven of its own")


def test_misuse_errors_are_runtime_errors_with_words():
    assert issubclass(OffloadError, RuntimeError)
    assert str(ForkError("pool", 1, 2)).startswith("pool was made in process 1 and is used in process 2; ")
    assert str(StateError("layer.0", "on_nvme", "in_flight")) == "layer.0: expected on_nvme, actual in_flight"
    assert "0x00000001 was written, 0x00000002 was read" in str(CorruptionError("/nvme/swap", "layer.0", 1, 2))


def inside(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(("data", "words"), [
    ({"gradient_clipping": 10**5000}, r"gradient_clipping = a value that cannot be shown \(int\)"),
    ({"aio": {"xyzzy": 10**5000}}, r"xyzzy = a value that cannot be shown \(int\): unknown key"),
    ({"aio": {"xyzzy": inside(100_000)}}, r"xyzzy = a value that cannot be shown \(list\): unknown key"),
    ({"aio": {"path_weights": {1.0, 2.0}}}, r"aio\.path_weights = .*: a set has no order; write a list"),
    ({"optimizer": {"params": {"betas": {0.9, 1.5}}}}, r"optimizer\.params\.betas = .*: a set has no order"),
], ids=["digits", "digits of an unknown key", "levels", "weights", "betas"])  # fmt: skip
def test_values_that_python_itself_stumbles_over_are_named(data, words):
    with pytest.raises(ConfigError, match=words):
        OffloadConfig.from_dict(data)
