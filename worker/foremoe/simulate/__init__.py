"""What-if over traces: strategies on a topology, balance exact, times modelled."""

from foremoe.simulate.report import write_report
from foremoe.simulate.run import Simulation, StrategyResult, simulate

__all__ = ["Simulation", "StrategyResult", "simulate", "write_report"]
