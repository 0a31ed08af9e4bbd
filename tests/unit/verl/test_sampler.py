"""Batched sampling equals sampling one by one, and its log-probs and routes are the model's own."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from foremoe.cli.toy_model import Shape, build_model  # noqa: E402
from foremoe.verl.moe_layers import experts_modules  # noqa: E402
from foremoe.verl.sampler import Request, Sample, Sampler  # noqa: E402

VOCABULARY = 40
SHAPE = Shape(experts=8, top_k=2, layers=2, hidden_size=32)


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    model = build_model(VOCABULARY, SHAPE, seed=1).eval()
    return Sampler(model, end_tokens=frozenset({1}), pad_token=0, record_routes=True)


def requests(count: int, **changes: object) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(
            **{
                "prompt": rng.integers(2, VOCABULARY, size=2 + index % 5).tolist(),
                "max_tokens": 3 + index % 4,
                "seed": index,
                **changes,
            }
        )
        for index in range(count)
    ]


def forced(sampler: Sampler, request: Request, sample: Sample) -> tuple[torch.Tensor, np.ndarray]:
    """Log-probs and routes of the sampled sequence from one plain forward call."""
    chosen = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, layer=layer: chosen.__setitem__(layer, args[1]))
        for layer, module in experts_modules(sampler._model).items()
    ]
    tokens = torch.tensor([request.prompt + sample.tokens])
    with torch.no_grad():
        logits = sampler._model(input_ids=tokens).logits[0]
    for hook in hooks:
        hook.remove()
    start = len(request.prompt)
    log_probs = logits.log_softmax(-1)[start - 1 : -1].gather(1, tokens[0, start:, None])[:, 0]
    routes = torch.stack([chosen[layer] for layer in sorted(chosen)], dim=1)
    return log_probs, routes[:-1].numpy()


def test_a_batch_samples_what_single_requests_sample(sampler: Sampler) -> None:
    together = sampler.run(requests(12))
    alone = [sampler.run([request])[0] for request in requests(12)]
    assert [sample.tokens for sample in together] == [sample.tokens for sample in alone]


def test_log_probs_and_routes_are_those_of_a_plain_forward_call(sampler: Sampler) -> None:
    asked = requests(12)
    for request, sample in zip(asked, sampler.run(asked), strict=True):
        log_probs, routes = forced(sampler, request, sample)
        assert torch.allclose(log_probs, torch.tensor(sample.log_probs), atol=1e-4)
        assert sample.routes is not None and sample.routes.dtype == np.int16
        assert sample.routes.shape == (len(request.prompt) + len(sample.tokens) - 1, SHAPE.layers, SHAPE.top_k)
        assert (np.sort(sample.routes, -1) == np.sort(routes, -1)).all()


def test_temperature_zero_takes_the_likeliest(sampler: Sampler) -> None:
    request = requests(1, temperature=0.0, ignore_end=True)[0]
    first, second = sampler.run([request, Request(**{**vars(request), "seed": 99})])
    assert first.tokens == second.tokens


def test_limits_and_end_tokens(sampler: Sampler) -> None:
    for request, sample in zip(requests(12), sampler.run(requests(12)), strict=True):
        assert len(sample.tokens) == request.max_tokens or sample.tokens[-1] == 1
        assert 1 not in sample.tokens[:-1]


def test_top_k_of_one_is_greedy(sampler: Sampler) -> None:
    greedy = sampler.run(requests(6, temperature=0.0))
    assert [s.tokens for s in sampler.run(requests(6, top_k=1))] == [s.tokens for s in greedy]
    assert [s.tokens for s in sampler.run(requests(6, top_p=1e-6))] == [s.tokens for s in greedy]


def test_sampling_follows_the_distribution(sampler: Sampler) -> None:
    prompt = [5, 6, 7]
    samples = sampler.run([Request(prompt=prompt, max_tokens=1, seed=seed) for seed in range(4000)])
    counts = np.bincount([sample.tokens[0] for sample in samples], minlength=VOCABULARY) / 4000
    with torch.no_grad():
        expected = sampler._model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    # Five standard deviations of a binomial share.
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected / 4000) + 1e-3).all()


def test_nothing_asked_nothing_sampled(sampler: Sampler) -> None:
    assert sampler.run([]) == []
