"""Passes that are run again on the way back are the same passes."""

from __future__ import annotations

import torch

from forge.rl.tree.passes import Passes, PassOutput, run_passes


def test_repeated_pass_draws_the_same_random_numbers() -> None:
    """For example dropout of an adapter: the gradient belongs to the log-probs of the loss."""
    weights = torch.rand(64, requires_grad=True)

    def run(_: int) -> PassOutput:
        dropped = torch.nn.functional.dropout(weights, 0.5)
        return PassOutput(logprobs_E=dropped, entropy_E=torch.zeros(64))

    edges = list(torch.arange(192).split(64))
    passes = Passes(
        run=run, edges=edges, kept=1, extra_loss=lambda _: None, device=torch.device("cpu")
    )
    logprobs_E, _ = run_passes(passes)
    after = torch.get_rng_state()
    (logprobs_E.sum()).backward()
    assert weights.grad is not None
    assert torch.allclose(weights.grad * weights, logprobs_E.view(3, 64).sum(0))
    assert torch.equal(torch.get_rng_state(), after)
