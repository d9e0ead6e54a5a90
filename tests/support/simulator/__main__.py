"""``python -m tests.support.simulator 17`` replays a seed; ``0:20000 --workers 2`` runs many.

A seed that fails is printed with its case, shrunk, and with the line that replays what is left of it.
"""

import argparse
import json
import sys

from tests.support.simulator.campaign import differing, fails, prepare, run_seeds, shrunk
from tests.support.simulator.case import Case, draw_case
from tests.support.simulator.mutations import MUTATIONS
from tests.support.simulator.subjects import SUBJECTS

_SEEDS_TO_FIND = range(80)[::-1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulator", description=__doc__)
    parser.add_argument("seeds", help="one seed, or first:end")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="break the package in this way first")
    parser.add_argument(
        "--find",
        action="append",
        default=[],
        help=f"MUTATION:SUBJECT; which of the first {len(_SEEDS_TO_FIND)} seeds finds it, of those of this subject",
    )
    parser.add_argument("--until-first", action="store_true", help="stop at the first violation")
    parser.add_argument("--alone", type=int, default=0, help="run so many of the last seeds again, each alone")
    parser.add_argument("--calls", help="places of the calls to make, of a single seed")
    parser.add_argument("--faults", help="places of the faults to keep, of a single seed")
    parser.add_argument("--json", action="store_true", help="print what came of it as one line")
    arguments = parser.parse_args()
    prepare()
    if ":" not in arguments.seeds:
        return _replay(arguments)
    first, end = map(int, arguments.seeds.split(":"))
    report = run_seeds(
        range(first, end), arguments.workers, until_first=arguments.until_first, mutation=arguments.mutation
    )
    if arguments.json:
        found = {str(seed): wrong for seed, wrong in report.violations.items()}
        other = differing(report, range(end - arguments.alone, end))
        said = {"num_seeds": report.num_seeds, "seconds": report.seconds, "violations": found, "differing": other}
        for name, subject in (each.split(":") for each in arguments.find):
            seeds = [seed for seed in _SEEDS_TO_FIND if draw_case(seed, SUBJECTS).subject == subject]
            broken = run_seeds(seeds, until_first=True, mutation=name)
            said[name] = min(broken.violations, default=None)
        _say(json.dumps(said))
        return 0
    for seed, wrong in list(report.violations.items())[:10]:
        _tell(draw_case(seed, SUBJECTS), wrong, arguments.mutation)
    _say(f"{report.num_seeds} seeds in {report.seconds:.0f} s: {len(report.violations)} violations")
    return bool(report.violations)


def _replay(arguments: argparse.Namespace) -> int:
    case = draw_case(int(arguments.seeds), SUBJECTS)
    calls, faults = list(range(len(case.calls))), list(range(len(case.faults)))
    if arguments.calls is not None:
        calls = _places(arguments.calls)
    if arguments.faults is not None:
        faults = _places(arguments.faults)
    case = case.keeping(calls, faults)
    wrong = fails(case, arguments.mutation)
    _say(case)
    _say(wrong or "nothing was wrong")
    return bool(wrong)


def _say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def _places(text: str) -> list[int]:
    return [int(place) for place in text.split(",") if place]


def _tell(case: Case, wrong: str, mutation: str | None) -> None:
    calls, faults = shrunk(case, mutation)
    command = f"python -m tests.support.simulator {case.seed}"
    command += f" --mutation '{mutation}'" if mutation else ""
    kept = f" --calls={','.join(map(str, calls))} --faults={','.join(map(str, faults))}"
    _say(f"seed {case.seed} fails:\n{wrong}\nreplay it: {command}\nshrunk:    {command}{kept}")
    _say(case.keeping(calls, faults))


if __name__ == "__main__":
    sys.exit(main())
