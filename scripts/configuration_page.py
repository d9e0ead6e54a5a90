"""Write docs/configuration.md, or the JSON schema, from the models of `offload.config.section`.

python -m scripts.configuration_page > docs/configuration.md
python -m scripts.configuration_page --schema > docs/configuration.schema.json
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from nvme_offload.offload.config.keys import Section, sections
from nvme_offload.offload.config.optimizer import OPTIMIZERS, OptimizerParams
from nvme_offload.offload.config.reader import WRAPPER
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.units import format_bytes

_INTRODUCTION = """\
# Configuration

All keys of the section. "DeepSpeed: same" behind a meaning says that DeepSpeed has the key, too.
Editors check and complete a file by `docs/configuration.schema.json`. Both are made from the models
in `offload/config`; do not edit them.

## Usage

```python
from nvme_offload import OffloadConfig

config = OffloadConfig.from_file("offload.json")  # or .toml, .yaml, or OffloadConfig.from_dict({...})
```

```json
{
  "zero_optimization": {
    "offload_optimizer": {
      "device": "nvme",
      "nvme_path": ["/mnt/nvme0", "/mnt/nvme1"],
      "staging_budget": "1GiB"
    }
  },
  "aio": {"block_size": "1MiB", "queue_depth": 32, "path_weights": [2, 1]},
  "gradient_clipping": 1.0
}
```

The same in TOML:

```toml
gradient_clipping = 1.0

[zero_optimization.offload_optimizer]
device = "nvme"
nvme_path = ["/mnt/nvme0", "/mnt/nvme1"]
staging_budget = "1GiB"

[aio]
block_size = "1MiB"
queue_depth = 32
path_weights = [2, 1]
```

Bytes are a whole number, or a string with a unit. KiB, MiB, GiB and TiB are powers of 1024; KB, MB,
GB and TB are powers of 1000. `null` means that the section is not there.

If anything is wrong, one `ConfigError` (a `ValueError`) lists every problem: the full key, its
value, and what to write instead. An unknown key is an error inside a section. At the top level it
is an error only if it looks like a known key; a warning names the others, because DeepSpeed ignores
them.

A section that was written for DeepSpeed is taken at its word. Each of its keys is honoured (see the
tables of the sections), accepted with a warning that says why it has [no meaning
here](#deepspeed-keys-without-meaning-here), or [refused](#keys-that-are-refused) with what to write
instead.

This call resolves Hugging Face's `"auto"`:

```python
config = OffloadConfig.from_training_arguments("ds_config.json", args, num_training_steps=1000)
```

It takes the values that `Trainer` puts in its place: batch sizes and accumulation, clipping,
learning rate, betas, epsilon, weight decay, the ends of a schedule, `fp16` and `bf16`. A section
without `optimizer` gets AdamW with them. A key that contradicts `args` is an error, as it is in
`Trainer`. Without this call `"auto"` means the default of this page, and one `ConfigWarning` lists
these keys.

A file may hold the section inside one table or object named `deepspeed`, with nothing beside it:
`[deepspeed.zero_optimization]` in TOML means `[zero_optimization]`.

In every path that you give, `~` is the home folder: in the section, in `initialize`, and in calls
such as `save_checkpoint("~/runs")`.

An optimizer without an engine reads `zero_optimization`, `offload_gradients`, `host_budget`,
`device_budget`, `aio`, `gradient_clipping`, `overlap_step` and `skip_non_finite`. It reads `stage`
and `gradient_accumulation_steps` only to know what a step moves. All other keys are for
`nvme_offload.initialize`. If a section that you give to an optimizer or a `TensorSwapper` has such
keys, one `ConfigWarning` names them.

`OffloadConfig.batch_sizes(world_size)` completes and checks the three batch keys. `compute_dtype`
and `autocast_dtype` say what the precision keys amount to. `optimizer.hyperparameters` are the
optimizer's arguments.

| What goes together | `gradient_accumulation_dtype` | `communication_data_type` |
|---|---|---|
| `bf16.enabled` | `bf16`, `fp32` | `bf16`, `fp32` |
| `fp16.enabled` | `fp16`, `fp32` | `fp16`, `fp32` |
| `torch_autocast.enabled` | `fp32` | `torch_autocast.dtype`, `fp32` |
| none of them | `fp32` | any |

Only one of the three may be enabled. All other combinations are errors that name both keys.
"""
_BY_TYPE = """\
| `optimizer.type` | `optimizer.params`, and their defaults |
|---|---|"""
_SPELLINGS = """\
## Other spellings

| Also | Is |
|---|---|"""
_IGNORED = """\
## DeepSpeed keys without meaning here

These keys are accepted with one `ConfigWarning` that says why they have no effect. If the key
column shows a value, only that value is accepted, and it is the default. Of a section only the keys
shown here are read, in the section itself or, if it has none of them, in the sections inside it.

| Key | Why it has no effect |
|---|---|"""
_OTHERWISE = """\
## Keys that mean something else in DeepSpeed when they are left out

If a section was written for DeepSpeed and leaves out one of these keys, one `ConfigWarning` says
so. A section counts as written for DeepSpeed if it has a key of the table above, another spelling
of a key, or `"auto"`, or if it stands in a table named `deepspeed`.

| Key | When it is left out |
|---|---|"""
_REFUSED = """\
## Keys that are refused

| Key | What to do |
|---|---|"""
_OUR_SECTIONS = ("offload_gradients", "activations")
_TABLE = """\
| Key | Default | Values | Meaning |
|---|---|---|---|"""


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, with the keys that are accepted without effect."""
    schema = OffloadConfig.model_json_schema()
    schema["properties"][WRAPPER] = {"$ref": "#", "description": "The whole section, where it stands alone."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def page() -> str:
    """The reference page, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    for prefix, model in sections(OffloadConfig):
        yield f"## {f'`{prefix[:-1]}`' if prefix else 'Top level'}\n\n{model.__doc__}\n\n{_TABLE}"
        yield from _rows(model)
        yield ""
        if model is OptimizerParams:
            yield _BY_TYPE
            for name, params in OPTIMIZERS.items():
                yield f"| `{name}` | {', '.join(f'`{key}`: {json.dumps(value)}' for key, value in params.items())} |"
            yield ""
    yield _SPELLINGS
    for prefix, model in sections(OffloadConfig):
        yield from (f"| `{prefix}{spelling}` | `{prefix}{name}` |" for spelling, name in model.SPELLINGS.items())
    yield "\n" + _IGNORED
    for prefix, model in sections(OffloadConfig):
        yield from _grouped(prefix, model.IGNORED)
        shown = {f"{key}: {json.dumps(only)}": why for key, (only, why) in model.ONLY.items()}
        yield from _grouped(prefix, shown)
    yield "\n" + _OTHERWISE
    for prefix, model in sections(OffloadConfig):
        yield from _grouped(prefix, model.OTHERWISE)
    yield "\n" + _REFUSED
    for prefix, model in sections(OffloadConfig):
        yield from _grouped(prefix, model.REFUSED)


def _grouped(prefix: str, table: Mapping[str, str]) -> Iterator[str]:
    for text in dict.fromkeys(table.values()):
        keys = ", ".join(f"`{prefix}{key}`" for key in table if table[key] == text)
        yield f"| {keys} | {text} |"


def _rows(model: type[Section]) -> Iterator[str]:
    properties = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        entry = plain(properties[name])
        meaning = " ".join((field.description or "").split())
        if "$ref" in entry:
            yield f"| `{name}` | | section | {meaning}{'' if name in _OUR_SECTIONS else ' (DeepSpeed: same)'} |"
            continue
        if entry["x-deepspeed"]:
            meaning += f" (DeepSpeed: {entry['x-deepspeed']})"
        yield f"| `{name}` | `{entry['x-default']}` | {_values(entry)} | {meaning} |"


def _values(entry: dict[str, Any]) -> str:
    """Say what may be written for a key, and in brackets its unit."""
    unit = entry["x-unit"]
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry.get("x-choices", entry["enum"]))
    return entry["x-write"] + (f" ({unit})" if unit and not unit.startswith("bytes") else "")


def plain(entry: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key without the null that an optional one may be."""
    return entry | entry["anyOf"][0] if "anyOf" in entry else entry


def bounds(entry: dict[str, Any]) -> str:
    """Return the range of a key, from the constraints in its JSON schema: its texts must have it."""
    show = format_bytes if entry["x-unit"] == "bytes" else str
    low, high, step = (entry.get(key) for key in ("minimum", "maximum", "multipleOf"))
    text = "" if low is None else f"{show(low)} or more" if high is None else f"{show(low)}..{show(high)}"
    if "exclusiveMinimum" in entry:
        text = f"more than {show(entry['exclusiveMinimum'])}"
    return f"{text}, a multiple of {show(step)}" if step else text


def main() -> None:
    """Print the page, or with --schema the JSON schema."""
    wants_schema = "--schema" in sys.argv[1:]
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n" if wants_schema else page())


if __name__ == "__main__":
    main()
