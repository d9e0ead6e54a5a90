"""Measure the processor time of `offload plan` and `offload init`, start of Python included, beside their bar.

python -m scripts.plan_seconds

Exit status: 1 where one takes more than `MOST_SECONDS`. For a model of transformers, what it takes to load that and to
build the model does not count. Modules are compiled already, as pip leaves them.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROUNDS = 5
MOST_SECONDS = 2.0
MEMORY = ["--host-memory", "64GiB"]
RATES = ["--read-bw", "7GB", "--write-bw", "1.5GB", "--flops", "1e14", "--tokens", "8192"]
LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
SIZES = ("7e9 --layers 32 --hidden 4096", "7e10 --layers 80 --hidden 8192")
BUILD = """
import sys, torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
with torch.device("meta"):
    transformers.AutoModelForCausalLM.from_config(config)
"""


def processor_seconds(*words: str, output: Path | None = None) -> float:
    """Run Python with these words some times; return the least that all its threads took: that was disturbed least.

    `output` is a file that it writes, which must not be there.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for _ in range(ROUNDS):
        if output is not None:
            output.unlink(missing_ok=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command, away = [sys.executable, *words], subprocess.DEVNULL
        subprocess.run(command, check=True, stdout=away, stderr=away, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(found)


def main() -> int:
    """Measure each, print a line for it, and return the exit status."""
    offload = "-m", "nvme_offload.perf.cli"
    with TemporaryDirectory() as model:
        written = Path(model) / "offload.json"
        (Path(model) / "config.json").write_text(json.dumps(LLAMA))
        builds = processor_seconds("-c", BUILD, model)
        found = {
            f"plan --params {size}": processor_seconds(*offload, "plan", "--params", *size.split(), *MEMORY, *RATES)
            for size in SIZES
        }
        of_model = "--model", model, *MEMORY
        found["plan --model"] = processor_seconds(*offload, "plan", *of_model, *RATES) - builds
        own = "--path", model, "--output", str(written)
        found["init --model"] = processor_seconds(*offload, "init", *of_model, *own, output=written) - builds
    torch = processor_seconds("-c", "import gc; gc.disable(); import torch")
    sys.stdout.write(f"import torch, which a plan from numbers includes: {torch:.2f} s of processor time\n")
    for name, seconds in found.items():
        sys.stdout.write(f"offload {name}: {seconds:.2f} s of processor time, at most {MOST_SECONDS:g}\n")
    return int(max(found.values()) > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
