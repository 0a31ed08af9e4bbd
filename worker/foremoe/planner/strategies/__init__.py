"""Balancing strategies behind one interface (`problem.StrategyModule`), one module each."""

from __future__ import annotations

from foremoe.planner.config import Strategy
from foremoe.planner.problem import StrategyModule
from foremoe.planner.strategies.eplb import Eplb
from foremoe.planner.strategies.foremoe import ForeMoE
from foremoe.planner.strategies.lplb import Lplb
from foremoe.planner.strategies.relibra import Relibra
from foremoe.planner.strategies.static import Static

STRATEGIES: dict[Strategy, StrategyModule] = {
    Strategy.STATIC: Static(),
    Strategy.EPLB: Eplb(),
    Strategy.LPLB: Lplb(),
    Strategy.RELIBRA: Relibra(),
    Strategy.FOREMOE: ForeMoE(),
}

__all__ = ["STRATEGIES"]
