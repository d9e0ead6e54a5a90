"""One checkpoint of all stages of a pipeline: each stage moves its part, and knows the names of the others."""

import torch.distributed as dist

from nvme_offload.optim.checkpoint.contents import Contents
from nvme_offload.optim.ranks.collective import gather


def contents_of_stages(contents: Contents, stages: dist.ProcessGroup | None) -> list[Contents]:
    """Return what the ranks of `stages` have; every rank must call it. Items and values stay where they are."""
    if stages is None:
        return [contents]
    described = Contents(contents.kinds, contents.paths, contents.tied, group_names=contents.group_names)
    return [*gather(described, stages).values()]


def take_on_stages(contents: Contents, stages: list[Contents]) -> None:
    """Add the names of all stages to those of this rank's stage; ValueError if two use the same one."""
    if len(stages) == 1:
        return
    owners: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name in (*stage.kinds, *stage.tied):
            if owners.setdefault(name, number) != number:
                raise ValueError(
                    f"stages {owners[name]} and {number} of the pipeline both have {name!r}, and a checkpoint has each "
                    "name once: let stages have the names of the whole model, as ModuleDict({'4': ...}) gives them, "
                    "and register buffers that all stages have with persistent=False"
                )
    contents.group_names[:] = [
        [name for names in of_stages for name in names]
        for of_stages in zip(*(stage.group_names for stage in stages), strict=True)
    ]
    for stage in stages:
        contents.kinds.update(stage.kinds)
        contents.paths.update(stage.paths)
        contents.tied.update(stage.tied)
