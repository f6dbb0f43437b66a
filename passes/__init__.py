"""Graph passes, one file each. Import as ``cadence_fx.passes``."""

if __name__ != "cadence_fx.passes":
    raise ImportError(f"{__name__!r} is a folder of cadence_fx: import cadence_fx.passes")

from cadence_fx.passes.eliminate_dead import EliminateDead
from cadence_fx.passes.fuse_pointwise import FusePointwise
from cadence_fx.passes.hoist_constants import HoistConstants
from cadence_fx.passes.lower_autocast import LowerAutocast
from cadence_fx.passes.normalise import Normalise
from cadence_fx.passes.remove_host_syncs import RemoveHostSyncs
from cadence_fx.passes.ring_writeback import RingWriteback
from cadence_fx.pipeline import GraphPass

__all__ = [
    "DEFAULT_PASSES",
    "EliminateDead",
    "FusePointwise",
    "HoistConstants",
    "LowerAutocast",
    "Normalise",
    "RemoveHostSyncs",
    "RingWriteback",
]

DEFAULT_PASSES: tuple[GraphPass, ...] = (
    Normalise(),
    LowerAutocast(),
    RemoveHostSyncs(),
    HoistConstants(),
    RingWriteback(),
    EliminateDead(),
)
