"""Building and warming up the toy model behind `foremoe model create`.

Three choices make a toy that is useful for routing work. The tokenizer is a byte-pair one trained on the task's own
questions with single digits kept apart: prompts become four times shorter than by characters, and any other text still
encodes. Router weights start wide, because transformers starts them near zero, where every token chooses alike. The
warm-up stops early on purpose: a policy that is right in a good third of its samples gives group-relative advantages
something to separate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from foremoe.cli.tasks import Problem, Task, problem_stream

PAD, EOS, UNKNOWN, USER, ASSISTANT = "<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, EOS, UNKNOWN, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'assistant' %}}{ASSISTANT}{{{{ message['content'] }}}}{EOS}"
    f"{{% else %}}{USER}{{{{ message['content'] }}}}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)
_VOCABULARY_SIZE = 384
_TOKENIZER_PROBLEMS = 256
_ROUTER_STD = 0.5
_WARMUP_BATCH = 32
_WARMUP_LEARNING_RATE = 1e-2
_MEASURED_PROBLEMS = 128
# Streams of problems must differ between their uses, or the measure would be over the warm-up's own batch order.
_WARMUP_SEED, _MEASURE_SEED = 1_000_003, 2_000_003


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of the architecture can be chosen."""

    experts: int = 16
    top_k: int = 4
    layers: int = 4
    hidden_size: int = 64


@dataclass(frozen=True, kw_only=True)
class WarmupStep:
    """One supervised step, as the progress bar shows it."""

    number: int
    loss: float


def quiet_transformers() -> None:
    """No bars of transformers' own beside ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def build_tokenizer(task: Task, *, seed: int) -> PreTrainedTokenizerFast:
    """A byte-level pair tokenizer trained on the task's questions, with a chat template."""
    questions = [p.question for p in itertools.islice(problem_stream(task, seed=seed), _TOKENIZER_PROBLEMS)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(questions, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    )


def build_model(vocabulary: int, shape: Shape, *, seed: int) -> Qwen3MoeForCausalLM:
    """A random Qwen3-MoE of that shape. Its vocabulary is the tokenizer's: veRL masks logits beyond it."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        moe_intermediate_size=shape.hidden_size // 2,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        bos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=_ROUTER_STD)
    return model


def warm_up(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, *, steps: int, seed: int
) -> Iterator[WarmupStep]:
    """Supervised steps on solved problems; the loss is on the answers alone. Yields after every step."""
    problems = problem_stream(task, seed=seed + _WARMUP_SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_WARMUP_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model.train()
    for number in range(1, steps + 1):
        batch = encode(tokenizer, list(itertools.islice(problems, _WARMUP_BATCH)))
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield WarmupStep(number=number, loss=float(loss.detach()))


@torch.no_grad()
def solve_rate(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, *, seed: int) -> float:
    """Mean probability, over fresh problems, of sampling exactly the right answer at temperature 1."""
    problems = list(itertools.islice(problem_stream(task, seed=seed + _MEASURE_SEED), _MEASURED_PROBLEMS))
    batch = encode(tokenizer, problems)
    model.eval()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return float((chosen * (labels >= 0)).sum(1).exp().mean())


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> dict[str, Any]:
    """Right-padded batch: `input_ids`, `attention_mask`, `labels` (-100 outside the answer), each [B, longest]."""
    pad = tokenizer.pad_token_id
    rows, prompts = [], []
    for problem in problems:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_dict=False
        )
        rows.append([*prompt, *tokenizer.encode(problem.answer, add_special_tokens=False), tokenizer.eos_token_id])
        prompts.append(len(prompt))
    longest = max(map(len, rows))
    input_ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    position = torch.arange(longest).unsqueeze(0)
    lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    attention_mask = (position < lengths).long()
    answer = (position >= torch.tensor(prompts).unsqueeze(1)) & (position < lengths)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": input_ids.masked_fill(~answer, -100),
    }
