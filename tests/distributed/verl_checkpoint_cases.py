"""Cases that save, resume, export and stream, run on every rank of a pool."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed.verl_engines import (
    batches_of,
    equal_bits,
    log_probs,
    make_engine,
    prepare_process,
    state_of,
    update,
    worst,
)


def resume(
    rank: int,
    world: int,
    *,
    directory: str,
    checkpoint: str,
    first: dict[str, Any],
    second: dict[str, Any],
    moved: bool = False,
) -> dict[str, Any]:
    """Save after one update under `first`; resume under `second`; the next update of both."""
    import numpy as np

    from foremoe.planner import BasePlacement

    prepare_process(**first)
    engine = make_engine(directory)
    batches = batches_of(directory, rank)
    saved = update(engine, batches[0])["parameters"]
    engine.save_checkpoint(checkpoint, global_step=1)
    expected = update(engine, batches[1])

    prepare_process(**second)
    resumed = make_engine(directory)
    if moved:
        home_E = np.roll(resumed._runtime.bases[0].home_E, 3)
        resumed._runtime.move_homes(BasePlacement(home_E=home_E, ranks=resumed.groups.info.size))
    resumed.load_checkpoint(checkpoint)
    loaded = equal_bits(state_of(resumed), saved)
    got = update(resumed, batches[1])
    return {
        "loaded": loaded,
        "differing": equal_bits(got["parameters"], expected["parameters"]),
        "gradient": worst(got["gradients"], expected["gradients"]),
        "parameter": worst(got["parameters"], expected["parameters"]),
        "norms": (got["norm"], expected["norm"]),
        "learning_rates": (resumed.lr_scheduler.get_last_lr(), engine.lr_scheduler.get_last_lr()),
    }


def load_foreign(rank: int, world: int, *, directory: str, checkpoint: str) -> str:
    """What loading a checkpoint of veRL's own engine says."""
    prepare_process()
    make_engine(directory, stock=True).save_checkpoint(checkpoint, global_step=1)
    try:
        make_engine(directory).load_checkpoint(checkpoint)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def export(
    rank: int, world: int, *, directory: str, checkpoint: str, expert_parallel: int | None = None
) -> dict[str, Any]:
    """The exported model against the engine's own log-probs, and streamed weights against the stock engine's."""
    from transformers import AutoModelForCausalLM

    prepare_process(expert_parallel=expert_parallel)
    engine = make_engine(directory, save=("model", "hf_model"))
    batch = batches_of(directory, rank)[0]
    update(engine, batch)
    engine.save_checkpoint(checkpoint, global_step=1)
    plain = AutoModelForCausalLM.from_pretrained(f"{checkpoint}/huggingface", dtype=torch.float32).eval()
    differing = equal_bits(dict(plain.state_dict()), state_of(engine))
    expected = []
    for ids in batch["input_ids"].unbind():
        logits = plain(input_ids=ids[None], use_cache=False).logits[0]
        expected.append(logits.log_softmax(-1).gather(-1, torch.roll(ids, -1)[:, None])[:, 0])
    wanted = torch.cat(expected)[torch.roll(batch["loss_mask"].values(), -1).bool()]
    # The record no longer is what the model would choose: without it both route live.
    batch = batch.exclude("routed_experts")
    streamed = dict(engine.get_per_tensor_param()[0])
    stock = dict(make_engine(directory, stock=True).get_per_tensor_param()[0])
    return {
        "differing": differing,
        "log_probs": float((log_probs(engine, batch) - wanted).abs().max()),
        "names": sorted(set(streamed) ^ set(stock)),
        "shapes": [name for name, value in stock.items() if streamed[name].shape != value.shape],
        "count": len(streamed),
        "streamed": equal_bits(packed(streamed), state_of(engine)),
    }


def packed(streamed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from foremoe.verl.rollout import pack_experts

    return {name: torch.from_numpy(array) for name, array in pack_experts(streamed.items()).items()}


def shard_export(rank: int, world: int, *, directory: str) -> str:
    prepare_process()
    try:
        make_engine(directory).get_per_tensor_param_shard()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "exported"
