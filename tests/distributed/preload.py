"""Imported once by the server that ranks are forked from: what every rank needs, and no thread with it.

Besides the libraries these are the planner's compiled kernels, which each rank would else load for itself, and the
configurations of all architectures, which transformers imports when it is first asked for a model's class. All of it
is then taken out of the garbage collector's sight: collections would walk through it again and again, and, since they
write into every object they visit, give each rank a copy of its own.
"""

from __future__ import annotations

import gc

from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import foremoe.verl.plugin  # isort: skip  # before veRL chooses its platform
import foremoe.verl.expert_engine  # noqa: F401  # isort: skip
from verl.utils.model import get_hf_auto_model_class

from foremoe.planner import warm_up

warm_up()
assert get_hf_auto_model_class(Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"])) is AutoModelForCausalLM
gc.collect()
gc.freeze()
