"""ForeMoE runtime: exact expert load balancing for RL post-training of Mixture-of-Experts models.

Layers, from the bottom: `errors`; `routing` and `topology` (what was routed, what the machine looks like); `planner`
(where experts sit and which copy computes which token); `simulate` (what-if over traces); `transfer` and `moe` (the
expert-parallel layer); `verl` (glue, loaded by veRL itself); `agent` (the process in a pod); `cli`.
Importing this package loads none of them.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
