"""A guard: no staging buffer is leased while a view of it is out, in the hands of FSDP2 or of a device's stream.

FSDP2 asks for all parameters of a group, and copies after that. Whether other bytes come in between depends on the
drive; that somebody may read into the buffer does not, and is found here in every run.
"""

from contextlib import contextmanager
from pkgutil import resolve_name

import pytest

GroupOfOne = resolve_name("nvme_offload.offload._fsdp_passes:_GroupOfOne")
Departure = resolve_name("nvme_offload.offload.shards.departures:Departure")
Loans = resolve_name("nvme_offload.offload.shards.loans:Loans")
ParamTier = resolve_name("nvme_offload.offload.shards.param_tier:ParamTier")
TieredShard = resolve_name("nvme_offload.offload.shards.stored:TieredShard")
Mover = resolve_name("nvme_offload.offload.staging.mover:Mover")
FSDPParamGroup = resolve_name("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup")


class ViewsOut:
    """Staging buffers of which somebody has a view, and will copy it."""

    def __init__(self):
        self.num_seen = 0
        self._asked = []
        self._departing = []
        self._loans = []

    def note(self, block):
        """FSDP2 was given a view of the buffer that a block has."""
        self.num_seen += 1
        self._asked.append((block, block.buffer))

    def send(self, departure, buffer):
        self._departing.append((departure, buffer))

    def check_held(self):
        """All were asked for: what FSDP2 copies now is where it was."""
        for block, buffer in self._asked:
            assert block.buffer is buffer, f"{block.name} has lost its buffer, of which a view is out"
            assert block.holds, f"nobody holds {block.name}, of which a view is out"

    def check_leased(self, buffer, to):
        self._loans = [(loan, other) for loan, other in self._loans if loan.is_out]
        for block, other in [*self._asked, *((loan.block, other) for loan, other in self._loans)]:
            assert other is not buffer, f"{to.name} gets the buffer of {block.name}, of which a view is out"
        self._departing = [pair for pair in self._departing if _is_under_way(pair[0].mark)]
        for departure, other in self._departing:
            assert other is not buffer, f"{to.name} gets the buffer of {departure.block.name}, which a device copies"

    def lend(self, loans, block):
        self._loans += [(loan, block.buffer) for loan in loans._made if loan.block is block and loan.is_out]

    def copied(self, of=None):
        """FSDP2 has copied what it asked for, all or of a block, or has given it up."""
        self._asked = [pair for pair in self._asked if of not in (None, pair[0])]


def _is_under_way(mark):
    """Whether a stand-in's stream has not come to a mark: asking the mark itself would move it on."""
    return mark is not None and mark.stream is not None and mark.stream.done < mark.number


def watch(patch):
    """Guard this process until `patch` is undone."""
    out = ViewsOut()

    def after(holder, name, then, *, first=lambda *arguments: None, ends=False):
        inner = getattr(holder, name)

        def call(one, *arguments, **more):
            first(one, *arguments)
            try:
                found = inner(one, *arguments, **more)
                then(found, one, *arguments)
            finally:
                if ends:
                    out.copied()
            return found

        patch.setattr(holder, name, call)

    after(TieredShard, "gather", lambda found, shard: shard.device.type == "cpu" and out.note(shard.block))
    after(TieredShard, "end_gather", lambda *unused: None, first=lambda shard: out.copied(shard.block))
    after(Mover, "lease", lambda found, staging, slot: found and out.check_leased(slot.buffer, slot))
    after(Loans, "lend", lambda found, loans, block, *unused: found and out.lend(loans, block))
    after(Departure, "send", lambda found, departure, memory, device: out.send(departure, memory))
    after(FSDPParamGroup, "unshard", lambda *unused: out.check_held(), ends=True)
    after(FSDPParamGroup, "wait_for_unshard", lambda *unused: None, ends=True)
    after(GroupOfOne, "_unshard_from", lambda *unused: None, first=lambda *unused: out.check_held(), ends=True)
    return out


@contextmanager
def watched():
    """Within, the guard stands; at the end it has seen something."""
    with pytest.MonkeyPatch.context() as patch:
        out = watch(patch)
        yield out
    assert out.num_seen, "no view of a staging buffer was asked for"


def end_all_but_the_latest(patch=None):
    """The mistake that the guard is for: each block is a gather, and who asks for the next one ends those before it."""
    set_in = setattr if patch is None else patch.setattr
    reserve = ParamTier.reserve

    def reserve_each(tier, groups, *arguments, together=None, **more):
        return reserve(tier, groups, *arguments, **more)

    def give_up(tier):
        for gather in [gather for gather in tier._gathers if gather is not tier._latest]:
            tier._end(gather)
        tier._keep(None)

    set_in(ParamTier, "reserve", reserve_each)
    set_in(ParamTier, "_give_up_stale", give_up)
