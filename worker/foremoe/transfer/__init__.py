"""Moving expert weights and gradients between ranks: paths, their choice, and the overlap with compute."""

from foremoe.transfer.control import ControlPlane
from foremoe.transfer.engine import Pending, TransferEngine, TransferTimes
from foremoe.transfer.moves import LinkSpeeds, Move, PathName, choose_paths
from foremoe.transfer.paths import DirectPath, HostPath, TransferPath

__all__ = [
    "ControlPlane",
    "DirectPath",
    "HostPath",
    "LinkSpeeds",
    "Move",
    "PathName",
    "Pending",
    "TransferEngine",
    "TransferPath",
    "TransferTimes",
    "choose_paths",
]
